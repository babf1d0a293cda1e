"""The variables of Weights & Biases set keys of `logging`, unless these are typed."""

import pytest

from sparsellm.config import from_overrides, save


@pytest.mark.parametrize(
    ("typed", "environment", "key", "value"),
    [
        ([], {}, "wandb", "offline"),  # the experiment's
        ([], {"WANDB_MODE": "online"}, "wandb", "online"),
        ([], {"WANDB_MODE": "DryRun"}, "wandb", "offline"),
        ([], {"WANDB_MODE": "online", "WANDB_DISABLED": "true"}, "wandb", "disabled"),
        ([], {"WANDB_DISABLED": "false"}, "wandb", "offline"),
        ([], {"WANDB_MODE": "foo"}, "wandb", "offline"),
        (["logging.wandb=online"], {"WANDB_MODE": "offline"}, "wandb", "online"),
        (["logging=online"], {"WANDB_DISABLED": "1"}, "wandb", "online"),
        (["logging=online"], {"WANDB_PROJECT": "ours"}, "wandb_project", "ours"),
        (["logging.wandb_project=mine"], {"WANDB_PROJECT": "ours"}, "wandb_project", "mine"),
        ([], {"WANDB_PROJECT": " "}, "wandb_project", "sparsellm"),
        ([], {"WANDB_ENTITY": "lab"}, "wandb_entity", "lab"),
        (["logging.wandb_entity=null"], {"WANDB_ENTITY": "lab"}, "wandb_entity", None),
        ([], {"WANDB_RUN_GROUP": "night"}, "wandb_group", "night"),
        ([], {"WANDB_TAGS": "a, b c,,"}, "wandb_tags", ["a", "b c"]),
        ([], {"WANDB_TAGS": "a" * 65}, "wandb_tags", []),
        (["logging.wandb_tags=[x]"], {"WANDB_TAGS": "a"}, "wandb_tags", ["x"]),
        ([], {"WANDB_NOTES": "it's a\nfirst try: x=1"}, "wandb_notes", "it's a\nfirst try: x=1"),
        ([], {"WANDB_NOTES": "costs ${X"}, "wandb_notes", None),
        ([], {"WANDB_NOTES": " ??? "}, "wandb_notes", None),
        ([], {"WANDB_NOTES": "why???"}, "wandb_notes", "why???"),
        ([], {"WANDB_PROJECT": "???"}, "wandb_project", "sparsellm"),
        ([], {"WANDB_TAGS": "a,???"}, "wandb_tags", []),
    ],
)
def test_a_variable_is_obeyed_unless_its_key_is_typed(monkeypatch, typed, environment, key, value):
    before = from_overrides(["experiment=smoke"])
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    config = from_overrides(["experiment=smoke", *typed])
    found = getattr(config.logging, key)
    assert (found.name if key == "wandb" else found) == value
    assert config.run.name == before.run.name


@pytest.mark.parametrize(
    ("of_the_run", "environment", "typed", "mode"),
    [
        ("disabled", {"WANDB_MODE": "online"}, [], "disabled"),
        ("offline", {"WANDB_MODE": "online"}, [], "offline"),
        ("online", {"WANDB_MODE": "offline"}, [], "offline"),
        ("online", {"WANDB_DISABLED": "true"}, [], "disabled"),
        ("online", {"WANDB_MODE": "foo"}, [], "online"),
        ("disabled", {"WANDB_MODE": "offline"}, ["logging.wandb=online"], "online"),
    ],
)
def test_a_run_that_starts_from_its_config_yaml_keeps_its_keys_and_the_environment_only_lowers_its_mode(
    tmp_path, monkeypatch, of_the_run, environment, typed, mode
):
    config = from_overrides(["experiment=smoke", f"logging.wandb={of_the_run}", "logging.wandb_project=mine"])
    save(config, tmp_path / "config.yaml")
    for name, text in (environment | {"WANDB_PROJECT": "ours", "WANDB_ENTITY": "lab"}).items():
        monkeypatch.setenv(name, text)
    found = from_overrides([f"--config={tmp_path / 'config.yaml'}", *typed]).logging
    assert (found.wandb.name, found.wandb_project, found.wandb_entity) == (mode, "mine", None)
