"""Upload a checkpoint's model to the Hugging Face hub.

Uploads the weights, config.json, tokenizer files, generation_config.json and the model card README.md of an hf/ folder,
and nothing else: no optimizer state, no other files. First verifies the checkpoint's checksums, loads model and
tokenizer with transformers, and lists the files; dry_run=true stops there. The model card must name a license:
license=NAME adds it to the uploaded card and leaves the checkpoint unchanged. The scores of `sparsellm evaluate` are
added to the uploaded card. Exit codes: 0 uploaded, or listed; 1 if the checkpoint cannot be uploaded or the hub refuses
it; 2 for a refused configuration.
"""

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

from sparsellm.config import PushConfig, entry_point, push_mistakes
from sparsellm.evaluation.results import RESULTS
from sparsellm.hf import card, hub, pretrained
from sparsellm.runs.layout import EVALUATION, HF
from sparsellm.runs.locate import Checkpoint, CheckpointNotFound, locate, not_found
from sparsellm.system import regular
from sparsellm.system.console import quantity, warn
from sparsellm.system.errors import SparsellmError, listed

CARD = "README.md"
CARD_LINES = 14  # number of lines shown from the model card
NAMED = 6  # maximum number of files listed in a message
HUBS_OWN = ".gitattributes"  # the hub adds this file to every repository


class NotSent(SparsellmError):
    """The upload failed or is incomplete. The message says why, and what to do."""


def _mistakes(config: PushConfig, _typed: list[str]) -> list[str]:
    found = push_mistakes(config) + (missing := not_found(config.checkpoint))
    if config.checkpoint and not missing and locate(config.checkpoint).folder is None:
        found.append(
            f"checkpoint={config.checkpoint} is not a local folder: give a run, a checkpoint or an {HF}/ folder"
        )
    return found


@entry_point("push", _mistakes)
def main(config: PushConfig) -> int:
    assert config.checkpoint is not None
    checkpoint = locate(config.checkpoint)
    try:
        if not config.dry_run:
            _need_hub()
        # huggingface_hub gets a folder that contains only links to the files to upload.
        with tempfile.TemporaryDirectory(prefix="sparsellm-push-") as name:
            folder = Path(name)
            (folder / CARD).write_text(_card(Path(checkpoint.model), config.license), encoding="utf-8")
            for path in _files(checkpoint):
                (folder / path.name).symlink_to(path.resolve())
            if tasks := _scores(checkpoint):
                text = (folder / CARD).read_text(encoding="utf-8")
                (folder / CARD).write_text(card.scored(text, checkpoint.title, tasks), encoding="utf-8")
            print(_listing(config, checkpoint, folder))
            if config.dry_run:
                print("dry_run=true: nothing was uploaded")
            else:
                # The commit's title names the run and the step, but no local folders.
                run = "" if checkpoint.run is None else f" {checkpoint.run.resolve().name}, step {checkpoint.step:,}"
                print(f"sent: {_send(config, folder, f'sparsellm push{run}')}")
    except (CheckpointNotFound, pretrained.BrokenModel, NotSent, OSError) as error:
        warn(f"checkpoint={checkpoint} was not uploaded: {' '.join(str(error).split())}")
        return 1
    return 0


def _scores(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """The scores that `evaluate` wrote for exactly these weights, over all rows of each task; {} if there are none."""
    try:
        found = json.loads(regular.content(checkpoint.output(EVALUATION) / RESULTS))
        return found["tasks"] if found["identity"] == checkpoint.identity() else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _need_hub() -> None:
    """Raise NotSent if there is no hub token or the hub does not answer. Called before gigabytes are read."""
    from huggingface_hub import get_token

    if get_token() is None:
        raise NotSent(
            "there is no hub token on this machine: create one with write access"
            " (https://huggingface.co/settings/tokens), then run `hf auth login` or set HF_TOKEN; dry_run=true needs"
            " none"
        )
    if (reason := hub.obstacle()) is not None:
        raise NotSent(
            f"{reason}: push a copy of the checkpoint's folder from a machine with a network; dry_run=true needs none"
        )


def _files(checkpoint: Checkpoint) -> list[Path]:
    """The files to upload except the model card, after verification. Raises NotSent if there are symbolic links or the
    model needs import_model, CheckpointNotFound if a checksum is wrong, and BrokenModel if the model does not load."""
    folder = Path(checkpoint.model)
    if links := sorted(path.name for path in folder.iterdir() if path.is_symlink()):
        raise NotSent(
            f"{listed(links, NAMED)} in {folder}: symbolic links, which are not followed; push a copy without links,"
            " made with `cp -rL`"
        )
    if checkpoint.has_checksums:
        checkpoint.identity()
    else:
        warn(str(checkpoint.unchecked))
    with hub.offline(True):
        if pretrained.is_foreign(folder):
            raise NotSent(
                "transformers alone cannot load it: convert it with `sparsellm import_model`, and add"
                f" a {CARD} to the result"
            )
        config = pretrained.read_config(folder)
        weights = pretrained.verify_files(folder, config)
        pretrained.read_model(folder)
        pretrained.read_tokenizer(folder, config.get_text_config().vocab_size)
    index = [] if weights == [pretrained.WEIGHTS] else [pretrained.INDEX]
    names = ["config.json", *index, *weights, *pretrained.COMPANIONS]
    return [folder / name for name in names if (folder / name).is_file()]


def _card(folder: Path, licence: str | None) -> str:
    """The model card to upload, with a licence. Raises NotSent if there is no readable card, or no single licence."""
    path = folder / CARD
    if not path.is_file():
        raise NotSent(f"{path} is missing: write a model card in a copy of the folder, and push the copy")
    try:
        text = path.read_text(encoding="utf-8")
        own = card.licence(text)
        if licence is not None and own not in (None, licence):
            raise NotSent(f"license={licence}, but {path} says {own}: leave license out, or change a copy of the card")
        name = own or licence
        if name is None:
            raise NotSent(
                f"{path} names no licence: give one with license=NAME that data and tokenizer allow, such as apache-2.0"
                " (https://huggingface.co/docs/hub/repositories-licenses)"
            )
        return card.licensed(text, name)
    except ValueError as error:
        raise NotSent(f"{path} cannot be read as a model card: {error}") from error


def _listing(config: PushConfig, checkpoint: Checkpoint, folder: Path) -> str:
    """The upload's destination, the files in `folder` with their sizes, and the first lines of the model card."""
    from huggingface_hub import constants

    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    names = max(map(len, sizes))
    private = "private" if config.private else "public"
    lines = [
        f"{checkpoint.model} -> {constants.ENDPOINT}/{config.repo}, branch {config.revision}, {private}",
        *(f"  {name:<{names}}  {size:>15,} bytes" for name, size in sizes.items()),
        f"  {quantity(len(sizes), 'file'):<{names}}  {sum(sizes.values()):>15,} bytes",
    ]
    if stay := sorted(path.name for path in Path(checkpoint.model).iterdir() if path.name not in sizes):
        lines.append(f"not uploaded: {', '.join(stay)}")
    shown = (folder / CARD).read_text(encoding="utf-8").splitlines()[:CARD_LINES]
    return "\n".join([*lines, f"{CARD} begins:", *(f"  {line}".rstrip() for line in shown)])


def _send(config: PushConfig, folder: Path, title: str) -> str:
    """Upload `folder` and return the commit's URL. Raises NotSent if the upload fails or is incomplete."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    api = HfApi()
    try:
        head, replace = _branch(api, config, folder)
        sent = api.upload_folder(
            repo_id=str(config.repo), folder_path=folder, revision=config.revision, parent_commit=head,
            delete_patterns="*" if replace else None, commit_message=title,
        )  # fmt: skip
        return sent.commit_url
    except (HTTPError, OSError, RuntimeError, ValueError) as error:  # from the hub, or from huggingface_hub
        status = getattr(getattr(error, "response", None), "status_code", None)
        remedy = "run the same command to try again"
        if status in (401, 403):
            remedy = (
                f"the token has no write access to {config.repo}: create one, then run `hf auth login` or set HF_TOKEN"
            )
        elif status == 412:
            remedy = "the branch has changed meanwhile: run the same command to check it again"
        raise NotSent(f"{type(error).__name__} from the hub ({error}); {remedy}") from error


def _branch(api: Any, config: PushConfig, folder: Path) -> tuple[str | None, bool]:
    """Create the repository and branch if needed. Returns the last commit of an existing branch, on which the upload
    must be based, and whether to remove the branch's files. Raises NotSent if the repository has another visibility
    than requested, or the branch has other files and `overwrite` is false."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    repo = str(config.repo)
    try:
        anywhere = api.model_info(repo)
    except RepositoryNotFoundError:
        api.create_repo(repo, private=config.private)
        if config.revision != "main":
            api.create_branch(repo, branch=config.revision)
        return None, False
    if anywhere.private != config.private:
        is_, asked = ("private", "true") if anywhere.private else ("public", "false")
        raise NotSent(f"repo={repo} exists and is {is_}: give private={asked} to keep that, or change its settings")
    try:
        found = api.model_info(repo, revision=config.revision, files_metadata=True)
    except RevisionNotFoundError:
        api.create_branch(repo, branch=config.revision)
        return None, True  # a new branch starts with the files of main
    others = sorted(
        each.rfilename
        for each in found.siblings
        if each.rfilename != HUBS_OWN and not _same(each, folder / each.rfilename)
    )
    if others and not config.overwrite:
        raise NotSent(
            f"repo={repo} has other files in its branch {config.revision}: {listed(others, NAMED)}. Give another repo,"
            " a new branch (revision=NAME), or overwrite=true, which replaces everything in the branch with the files"
            " listed above; its history keeps the old files"
        )
    return found.sha, bool(others)


def _same(theirs: Any, ours: Path) -> bool:
    """Whether the hub's file `theirs` equals `ours`, by SHA-256 for large files and git's SHA-1 for others."""
    if not ours.is_file() or theirs.size != ours.stat().st_size:
        return False
    if theirs.lfs is None:
        content = ours.read_bytes()
        return theirs.blob_id == hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    with ours.open("rb") as file:
        return theirs.lfs.sha256 == hashlib.file_digest(file, "sha256").hexdigest()
