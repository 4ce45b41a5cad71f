"""A signal in any phase of a run: its exit code, one line, nothing left behind, and the same command goes on."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_collab.runtime.signals import EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_TERMINATED
from tests.e2e.test_booking import shared_memory
from tests.program import Program, lines, steps_done

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1200)]

RL = ["experiment=booking", "train.steps=5", "train.checkpoint_every=5", "train.prompts_per_step=2"]
RL += ["train.rollouts_per_prompt=2", "rollout.futures=1", "train.eval_tasks=2"]
RL += ["reward.malformed=null", "reward.weights.token_amount=-0.01"]  # the random model ends no turn by itself
NO_RUN = {"imports": "megatron_collab.launch.validate", "the launcher": "torch.distributed.run"}
PHASES = {
    "start of the servers": "megatron_collab.inference.server:SGLangServer.wait_healthy",
    "start of Ray": "megatron_collab.runtime.ray_cluster:_start_ray",
    "load": "megatron_collab.checkpoint.hf:load_hf",
    "evaluation": "megatron_collab.rollout.manager:RolloutManager.evaluate",
    "rollout": "megatron_collab.rollout.manager:RolloutManager.collect:2",
    "reward": "megatron_collab.reward.workers:RewardWorker._apply",
    "publish": "megatron_collab.weight_sync.sync:WeightSync.sync:2",
    "update": "megatron_collab.trainer.trainer:PolicyTrainer.update:2",
    "save": "megatron_collab.checkpoint.checkpointer:Checkpoints.save",
}


@pytest.fixture(scope="module")
def temporary() -> Iterator[Path]:
    """A temporary folder with a short path: sockets are in it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


Ended = tuple[int, list[str]]  # the exit code, and our lines
Signalled = Callable[..., Ended]


@pytest.fixture(scope="module")
def signalled(tmp_path_factory: pytest.TempPathFactory, temporary: Path) -> Iterator[Signalled]:
    """Starts the run and sends a signal once it reaches a phase, to `everyone` in it or to its first process."""
    root = tmp_path_factory.mktemp("signals")
    shutil.copy(Path(__file__).with_name("phases.py"), root / "sitecustomize.py")
    programs: list[Program] = []

    def start(
        run: Path,
        phase: str,
        number: signal.Signals,
        everyone: bool = False,
        twice: bool = False,
        defaults: str = "INT,HUP",
    ) -> Ended:
        mark = root / f"mark{len(programs)}"
        settings = [*RL, f"run.dir={run}", f"data.dir={root}/world", f"model.path={root}/world/model"]
        environment = {"PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}", "TMPDIR": str(temporary)}
        environment |= {"PHASE": phase, "MARK": str(mark)}
        program = Program(settings, root / f"console{len(programs)}.log", defaults=defaults, **environment)
        programs.append(program)
        program.when(mark.exists)
        shared = shared_memory(program)
        for process in program.processes() if everyone else [program.process]:
            process.send_signal(number)
        if twice:
            program.when(lambda: "repeat to stop at once" in program.log.read_text())
            program.process.send_signal(number)
        else:  # a second signal kills the process that dwells
            mark.with_name(f"{mark.name}-sent").touch()
        code, output = program.wait(), program.log.read_text()
        assert "Traceback" not in output
        assert program.gone() == []
        assert not list(temporary.iterdir())
        assert not [file for file in shared if file.exists()]
        return code, [line for line in output.splitlines() if line.startswith("megatron-collab:")]

    yield start
    for program in programs:
        program.end()


def test_a_termination_under_nohup(tmp_path: Path, signalled: Signalled) -> None:
    """Which has SIGHUP ignored, as the launcher passes SIGTERM on."""
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        code, messages = signalled(tmp_path / "run", PHASES["start of Ray"], signal.SIGTERM, defaults="INT")
    finally:
        signal.signal(signal.SIGHUP, ignored)
    assert (code, len(messages)) == (EXIT_PREEMPTED, 1) and messages[0].startswith(
        "megatron-collab: received SIGTERM; "
    )


def test_a_termination_before_the_run_has_begun(tmp_path: Path, signalled: Signalled) -> None:
    """Nothing could be saved, and no time is lost."""
    for phase in NO_RUN.values():
        messages = ["megatron-collab: received SIGTERM before the run began; exiting"]
        assert signalled(tmp_path / "run", phase, signal.SIGTERM) == (EXIT_TERMINATED, messages)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_termination_saves_in_every_phase_and_the_same_command_goes_on(tmp_path: Path, signalled: Signalled) -> None:
    run = tmp_path / "run"
    for phase, place in PHASES.items():
        done = steps_done(run) + place.endswith(":2")
        code, messages = signalled(run, place, signal.SIGTERM, everyone=phase == "rollout")
        assert (code, len(messages)) == (EXIT_PREEMPTED, 1), (phase, messages)
        assert messages[0].startswith("megatron-collab: received SIGTERM; "), phase
        latest = run / "checkpoints" / "latest"
        saved = latest.read_text() if latest.exists() else "step_0"
        assert saved == f"step_{steps_done(run)}", phase
        # The reward may be the last that the step waits for: then the step may end before the notice is seen.
        expected = {"save": {5}, "reward": {done, done + 1}}.get(phase, {done})
        assert steps_done(run) in expected, phase
    assert [line["step"] for line in lines(run / "metrics.jsonl")] == list(range(steps_done(run)))


def test_ctrl_c_stops_after_the_step_and_twice_at_once(tmp_path: Path, signalled: Signalled) -> None:
    run, latest = tmp_path / "run", tmp_path / "run" / "checkpoints" / "latest"
    code, messages = signalled(run, NO_RUN["imports"], signal.SIGINT)
    assert (code, messages) == (EXIT_INTERRUPTED, ["megatron-collab: received SIGINT before the run began; exiting"])
    code, messages = signalled(run, PHASES["load"], signal.SIGINT)
    assert (code, len(messages)) == (EXIT_INTERRUPTED, 1) and messages[0].startswith(
        "megatron-collab: received SIGINT; "
    )
    for done, phase in enumerate(["evaluation", "reward"], 1):
        code, messages = signalled(run, PHASES[phase], signal.SIGINT)
        assert (code, messages[0]) == (
            EXIT_INTERRUPTED,
            "megatron-collab: SIGINT: stopping after this step; repeat to stop at once",
        )
        assert len(messages) == 2 and f"saved step_{done} and all groups finished since" in messages[1]
        assert (steps_done(run), latest.read_text()) == (done, f"step_{done}")
    code, messages = signalled(run, PHASES["rollout"].removesuffix(":2"), signal.SIGINT, twice=True)
    assert (code, messages[-1]) == (
        EXIT_INTERRUPTED,
        "megatron-collab: second SIGINT: killed; the last checkpoint counts",
    )
    assert steps_done(run) == 2
