"""A command line becomes runs, their commands, and one list of all mistakes."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from attack.small_export import cut, damaged, write_export

from sparsellm.config import Activation, ConfigError, fingerprint, from_overrides, save, sweep_request
from sparsellm.sweep import commands
from sparsellm.sweep.plan import plan

COEFFICIENTS = "sparsity.l1_coefficient=0,5e-6,1e-3"


def refused(*arguments):
    with pytest.raises(ConfigError) as error:
        plan(list(arguments))
    return error.value.mistakes


def test_points_are_the_product_and_have_names_of_what_is_swept_in_one_order(tmp_path):
    sweep = plan(["experiment=smoke", COEFFICIENTS, "training.seed=0,1", "training.steps=50", f"run.root={tmp_path}"])
    assert sweep.keys == ["sparsity.l1_coefficient", "training.seed"]
    assert [(float(p.values["sparsity.l1_coefficient"]), p.values["training.seed"]) for p in sweep.points] == [
        (coefficient, seed) for coefficient in (0, 5e-6, 1e-3) for seed in ("0", "1")
    ]
    for point in sweep.points:
        shown = (
            f"l1_coefficient_{float(point.values['sparsity.l1_coefficient']):g}-seed_{point.values['training.seed']}"
        )
        assert point.name == f"smoke-{shown}-{fingerprint(point.config)}"
        assert from_overrides(commands.train(sweep, point)[3:]).run.name == point.name
    turned = plan(["training.seed=0,1", "training.steps=50", COEFFICIENTS, "experiment=smoke", f"run.root={tmp_path}"])
    assert {point.name for point in turned.points} == {point.name for point in sweep.points}
    assert turned.name == sweep.name

    # Runs that were trained before, by hand or by another sweep, are these.
    by_hand = [point.by_hand for point in sweep.points[:2]]
    for point, name in zip(sweep.points, (by_hand[0], f"mine-{fingerprint(sweep.points[1].config)}"), strict=False):
        (tmp_path / name).mkdir()
        save(point.config, tmp_path / name / "config.yaml")
    (tmp_path / f"empty-{fingerprint(sweep.points[2].config)}").mkdir()
    again = plan(["experiment=smoke", COEFFICIENTS, "training.seed=0,1", "training.steps=50", f"run.root={tmp_path}"])
    expected = [by_hand[0], f"mine-{fingerprint(sweep.points[1].config)}"]
    assert [point.name for point in again.points] == expected + [point.name for point in sweep.points[2:]]
    assert again.name == sweep.name


def test_runs_at_once_have_gpus_of_their_own_or_share_them(monkeypatch):
    def slots(gpus, *options, visible=None):
        monkeypatch.setattr("sparsellm.sweep.plan.torch.cuda.device_count", lambda: gpus)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        sweep = plan(["experiment=smoke", "runtime.device=auto", COEFFICIENTS, *options])
        return sweep.processes, [slot.get("CUDA_VISIBLE_DEVICES") for slot in sweep.slots]

    assert slots(4) == (4, [None])
    assert slots(4, "sweep.parallel=4") == (1, ["0", "1", "2", "3"])
    assert slots(4, "sweep.parallel=2") == (2, ["0,1", "2,3"])
    assert slots(2, "sweep.parallel=2", visible="5,7") == (1, ["5", "7"])
    assert slots(2, "sweep.parallel=4", "sweep.share_gpus=true") == (1, ["0", "1", "0", "1"])
    assert slots(0, "sweep.parallel=3") == (1, [None] * 3)
    with pytest.raises(ConfigError, match=r"sweep\.parallel=4 needs 4 GPUs, but this machine has 2"):
        slots(2, "sweep.parallel=4")


def test_hydras_grammar_decides_what_is_a_list_of_values():
    given = ["data.files=[a,b]", "data.tokenizer='x,y'", "training.steps=range(50,53)", "sparsity=choice(l1,relu)"]
    assert sweep_request(given).axes == {
        "data.files": ["data.files=[a,b]"],
        "data.tokenizer": ["data.tokenizer='x,y'"],
        "training.steps": ["training.steps=50", "training.steps=51", "training.steps=52"],
        "sparsity": ["sparsity=l1", "sparsity=relu"],
    }


def test_groups_can_be_swept():
    sweep = plan(["experiment=smoke", "sparsity=relu,dense_silu", "sparsity.l1_coefficient=0"])
    assert [p.values for p in sweep.points] == [{"sparsity": "relu"}, {"sparsity": "dense_silu"}]
    assert [p.config.sparsity.activation for p in sweep.points] == [Activation.relu, Activation.silu]


def test_baselines_take_every_other_value_and_none_of_sparsity():
    sweep = plan(["experiment=smoke", COEFFICIENTS, "training.seed=3,4", "sweep.baseline=true"])
    dense = [point for point in sweep.points if point.baseline]
    assert sweep.points[-2:] == dense
    assert [p.values for p in dense] == [{"training.seed": s, "sparsity.l1_coefficient": "0"} for s in ("3", "4")]
    by_hand = ["experiment=smoke", "training.seed=3", "sparsity=dense_silu", "sparsity.l1_coefficient=0"]
    assert dense[0].by_hand == from_overrides(by_hand).run.name
    assert dense[0].name.startswith("smoke-dense_silu-l1_coefficient_0-seed_3-")


def test_the_name_follows_from_the_points_alone():
    base = plan(["experiment=smoke", COEFFICIENTS]).name
    assert base.startswith("smoke-")
    for same in ("sweep.baseline=true", "sweep.evaluate=false", "runtime.data_workers=1", "evaluate.limit=3"):
        assert plan(["experiment=smoke", COEFFICIENTS, same]).name == base, same
    assert plan(["experiment=smoke", "sparsity.l1_coefficient=1e-3,0,5e-6"]).name == base
    assert plan(["experiment=smoke", COEFFICIENTS, "training.seed=1"]).name != base
    assert plan(["experiment=smoke", COEFFICIENTS, "sweep.name=mine", "sweep.root=x"]).folder.as_posix() == "x/mine"
    at_home = plan(["experiment=smoke", COEFFICIENTS, "sweep.name=mine", "sweep.root=~/x"]).folder
    assert at_home == Path.home() / "x/mine"


def test_commands_are_argument_lists_through_torchrun_where_there_are_several_processes():
    arguments = ["experiment=smoke", COEFFICIENTS, "run.root='my runs'"]
    options = ["sweep.name=s", "evaluate.tasks=[piqa,arc_easy]"]
    one, two = (plan([*arguments, *options, f"sweep.nproc_per_node={n}"]) for n in (1, 2))
    point = two.points[1]
    overrides = ["experiment=smoke", "sparsity.l1_coefficient=5e-06", "run.root='my runs'", f"run.name={point.name}"]
    overrides += ["logging.wandb_group=s"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    assert commands.train(one, point) == [sys.executable, "-m", "sparsellm.train", *overrides]
    assert commands.train(two, point) == [sys.executable, *torchrun, "-m", "sparsellm.train", *overrides]
    assert from_overrides(commands.train(one, point)[3:]).run.name == point.name
    checkpoint = f"checkpoint='my runs/{point.name}/checkpoints/step_00000400'"
    evaluation = [*torchrun, "-m", "sparsellm.evaluate", checkpoint, "tasks=[piqa,arc_easy]"]
    assert commands.evaluate(two, point) == [sys.executable, *evaluation]
    mine = plan([*arguments, *options, "logging.wandb_group=mine"])
    assert commands.train(mine, mine.points[0]).count("logging.wandb_group=mine") == 1
    assert "logging.wandb_group=s" not in commands.train(mine, mine.points[0])


def test_files_of_ones_own_reach_every_run(tmp_path):
    (tmp_path / "own/model").mkdir(parents=True)
    (tmp_path / "own/model/small.yaml").write_text("defaults: [tiny]\nnum_layers: 2\n")
    (tmp_path / "mine.yaml").write_text("training: {steps: 50}\n")
    options = [f"--config={tmp_path}/mine.yaml", f"--config-dir={tmp_path}/own"]
    arguments = ["--config", f"{tmp_path}/mine.yaml", options[1], "model=tiny,small", f"run.root={tmp_path}"]
    sweep = plan([*arguments, "sweep.nproc_per_node=1"])
    assert [(p.config.model.num_layers, p.config.training.steps) for p in sweep.points] == [(4, 50), (2, 50)]
    for point in sweep.points:
        given = commands.train(sweep, point)[3:]
        assert given[:2] == options
        assert from_overrides(given).run.name == point.name
    assert shlex.join(arguments) in commands.slurm_script(sweep, arguments)
    (tmp_path / "mine.yaml").write_text("run: {name: x}\n")
    assert "run.name in a sweep: a run's name follows from its configuration; leave it out" in refused(*arguments)


def test_a_group_in_the_environment_is_left_to_the_runs_unless_they_start_from_a_runs_file(monkeypatch, tmp_path):
    save(from_overrides(["experiment=smoke"]), tmp_path / "config.yaml")
    sweep = plan(["experiment=smoke", COEFFICIENTS])
    grouped = [commands.GROUP in " ".join(commands.train(sweep, sweep.points[0]))]
    monkeypatch.setenv("WANDB_RUN_GROUP", "night")
    sweep = plan(["experiment=smoke", COEFFICIENTS])
    grouped.append(commands.GROUP in " ".join(commands.train(sweep, sweep.points[0])))
    sweep = plan([f"--config={tmp_path / 'config.yaml'}", COEFFICIENTS])  # its wandb_group: null wins
    grouped.append(commands.GROUP in " ".join(commands.train(sweep, sweep.points[0])))
    assert grouped == [True, False, True]


def test_printed_commands_are_those_that_would_run():
    arguments = ["experiment=smoke", COEFFICIENTS, "run.root='my runs'", "sweep.mode=print"]
    sweep = plan(arguments)
    lines = commands.text(sweep, arguments).splitlines()
    for point, line in zip(sweep.points, lines, strict=False):
        expected = [*commands.train(sweep, point), "&&", *commands.evaluate(sweep, point)]
        assert shlex.split(line) == expected
    assert lines[-1].startswith("# ")
    assert "sweep.mode" not in lines[-1]


def test_the_slurm_script_hands_each_task_one_point(tmp_path):
    arguments = ["experiment=smoke", COEFFICIENTS, "run.root='my runs'", "sweep.mode=slurm", "sweep.nproc_per_node=8"]
    script = tmp_path / "slurm.sh"
    script.write_text(commands.slurm_script(plan(arguments), arguments).replace("exec ", "printf '%s\\n' "))
    assert "#SBATCH --array=0-2\n" in script.read_text()
    assert "#SBATCH --gpus-per-node=8\n" in script.read_text()
    done = subprocess.run(
        ["bash", script], env={"SLURM_ARRAY_TASK_ID": "2"}, capture_output=True, text=True, check=True
    )
    kept = [argument for argument in arguments if argument != "sweep.mode=slurm"]
    assert done.stdout.splitlines() == [sys.executable, "-m", "sparsellm.sweep", *kept, "sweep.point=2"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["training.steps=[1"], "training.steps is [1: it should be a whole number"),
        (["sparsity.l1_coef=0,1"], "sparsity.l1_coef is not a key: did you mean sparsity.l1_coefficient?"),
        (
            ["sparsity.l1_coefficient=interval(0,1)"],
            "takes a list of values in order, like sparsity.l1_coefficient=1,2",
        ),
        (["training.seed=shuffle(1,2)"], "training.seed takes a list of values in order"),
        (["sweep.nam=a"], "sweep.nam is not a key: did you mean sweep.name? sweep has name, root, mode"),
        (["sweep.modus=3"], "sweep.modus is not a key: did you mean sweep.mode? sweep has name, root, mode"),
        (["sweep.mode=fly"], "sweep.mode is fly: it should be one of run, print, slurm"),
        (["sweep.point=0,1"], "sweep.point takes one value"),
        (["sweep.point=1"], "it should be from 0 to 0, the points of this sweep"),
        (["sweep.name=A/B"], "sweep.name is 'A/B'"),
        (["sweep.nproc_per_node=0"], "sweep.nproc_per_node is 0"),
        (["sweep.mode=slurm"], "needs sweep.nproc_per_node"),
        (["sweep.parallel=0"], "sweep.parallel is 0: it should be at least 1"),
        (["sweep.parallel=2", "sweep.point=0"], "sweep.parallel is 2, and SLURM starts tasks in parallel"),
        (["sweep.nproc_per_node=3"], "training.batch_size 8 is not divisible by the number of ranks, 3"),
        (["evaluate.limits=3"], "evaluate: limits is not a key: did you mean limit?"),
        (["evaluate.limits=3", "sweep.evaluate=false"], "evaluate: limits is not a key: did you mean limit?"),
        (["evaluate.data_dir=nowhere"], "evaluate: data_dir=nowhere is not a folder"),
        (["evaluate.tasks=[piqa,pica]"], "evaluate: tasks has pica"),
        (["evaluate.output_dir=x"], "evaluate.output_dir in a sweep: every run has its own"),
        (["run.restart=true"], "run.restart in a sweep"),
        (["run.name=a,b"], "run.name in a sweep"),
        (["runtime.data_workers=0,1"], "are the same run"),
        (["sparsity.l1_coefficient=1e-3,0.001"], "is in the sweep twice: give each value once"),
        (
            ["model.gated=false", "sweep.baseline=true"],
            "the only activation of models without a gate (in the dense baseline",
        ),
    ],
)
def test_what_cannot_be_swept_is_refused_by_name(arguments, words):
    found = refused("experiment=smoke", *arguments)
    assert any(words in mistake for mistake in found), found


def test_all_mistakes_of_all_points_at_once_each_once():
    wrong = ["training.batch_size=7", "sparsity.l1_coefficient=-1,-2", "sweep.nproc_per_node=2"]
    found = refused("experiment=smoke", *wrong)
    assert [f.split(":")[0] for f in found] == [
        "sparsity.l1_coefficient is -1.0", "training.batch_size 7 is not divisible by the number of ranks, 2",
        "sparsity.l1_coefficient is -2.0",
    ]  # fmt: skip


def test_mistakes_in_what_was_typed_for_the_sweep_its_runs_and_its_evaluations_are_listed_together():
    found = refused("sweep.mod=print", "sparsity.l1_coeficient=1,2", "evaluate.limt=3")
    assert [mistake.split(" is not a key")[0] for mistake in found] == [
        "sweep.mod", "sparsity.l1_coeficient", "evaluate: limt",
    ]  # fmt: skip


def test_a_model_that_no_point_can_read_is_named_once(tmp_path):
    source = f"init_from={tmp_path}/none"
    (mistake,) = refused("experiment=smoke", COEFFICIENTS, source)
    assert mistake.startswith(f"{source} does not exist")
    whole = write_export(tmp_path)
    torn = damaged(whole, tmp_path / "torn", cut("model.safetensors", 0.5))
    found = refused("experiment=smoke", COEFFICIENTS, f"init_from={torn}", "training.sequence_length=64")
    assert len([each for each in found if each.startswith(f"init_from={torn} cannot be read")]) == 1


def test_under_torchrun_it_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert "a sweep starts torchrun itself for each of its runs: start the sweep without torchrun" in refused(
        "experiment=smoke"
    )
