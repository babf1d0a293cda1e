"""A configuration as plain values and back, and which of them define a run."""

from sparsellm.config import fingerprint, from_dict, from_overrides, to_dict


def test_dict_round_trip():
    config = from_overrides(["experiment=0p5b", "data=files", "data.files=[a,b]", "data.tokenizer=t"])
    assert from_dict(to_dict(config)) == config


def test_the_fingerprint_ignores_only_runtime_logging_evaluation_and_run():
    base = from_overrides([])
    for free in ("runtime.micro_batch_size=2", "runtime.kernels=torch", "logging.every=5", "evaluation.every=5",
                 "run.checkpoint_every=7"):  # fmt: skip
        assert fingerprint(from_overrides([free])) == fingerprint(base), free
    for change in ("sparsity.l1_coefficient=2e-3", "training.seed=1", "data.seed=1", "optimizer.eps=1e-7"):
        assert fingerprint(from_overrides([change])) != fingerprint(base), change


def test_keys_that_came_later_leave_the_names_of_runs_without_them_as_they_were():
    assert fingerprint(from_overrides([])) == "69c4a6a9"
    assert from_overrides(["experiment=0p5b"]).run.name == "0p5b-b413d0af"
    for change in ("optimizer.schedule=wsd", "optimizer.decay_fraction=0.3"):
        assert fingerprint(from_overrides([change])) != fingerprint(from_overrides([])), change
