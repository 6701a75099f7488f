from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from preceptor.launch.child import Part, State
from preceptor.launch.errors import PartFailed
from preceptor.launch.settings import LaunchSettings
from preceptor.launch.supervisor import Supervisor
from tests.launch.processes import running, wait_for

SLEEP = "import time; time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); {SLEEP}"


def python(name: str, code: str, **settings) -> Part:
    return Part(name, [sys.executable, "-c", code], **settings)


def supervise(tmp_path: Path, *parts: Part, **settings) -> Supervisor:
    settings = {"restart_backoff_seconds": 0.0, "stop_grace_seconds": 5.0, **settings}
    return Supervisor(parts, tmp_path / "logs", LaunchSettings(**settings))


def run(supervisor: Supervisor, seconds: float = 20.0) -> None:
    """Look until the run ends by itself."""
    wait_for(lambda: supervisor.look() or time.sleep(0.02), seconds)


def test_the_main_part_ends_the_run_and_nothing_is_left(tmp_path):
    helper = python("helper", SLEEP)
    main = python("main", "import time; time.sleep(.3)", ends_run=True)
    with supervise(tmp_path, helper, main) as supervisor:
        supervisor.look()
        pids = [child.pid for child in supervisor.children]
        assert len(running(pids)) == 2
        run(supervisor)
    assert running(pids) == []
    assert [child.state for child in supervisor.children] == [State.ENDED, State.ENDED]


def test_a_part_waits_for_what_it_needs(tmp_path):
    flag = tmp_path / "flag"
    slow = python("slow", f"import time; time.sleep(.4); open({str(flag)!r}, 'w'); {SLEEP}",
                  ready=flag.exists)  # fmt: skip
    main = python("main", f"import os; assert os.path.exists({str(flag)!r})", needs=("slow",),
                  ends_run=True, restart=False)  # fmt: skip
    with supervise(tmp_path, slow, main) as supervisor:
        run(supervisor)


def test_a_killed_part_is_started_again_and_counted(tmp_path):
    helper = python("helper", SLEEP, ready=lambda: True)
    with supervise(tmp_path, helper) as supervisor:
        (child,) = supervisor.children
        for restarts in (1, 2):
            wait_for(lambda: supervisor.look() or child.state is State.READY)
            pid = child.pid
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda pid=pid: supervisor.look() or child.pid not in (None, pid))
            assert child.restarts == restarts
    assert running([pid]) == []


def test_an_exit_of_0_is_a_death_too_unless_it_ends_the_run(tmp_path):
    starts = tmp_path / "starts"
    code = f"open({str(starts)!r}, 'a').write('x')"
    with (
        supervise(tmp_path, python("helper", code), restart_budget=2) as supervisor,
        pytest.raises(PartFailed, match="exited with 0"),
    ):
        run(supervisor)
    assert starts.read_text() == "xxx"


def test_beyond_the_budget_the_run_fails_with_the_logs_end(tmp_path):
    helper = python("helper", SLEEP)
    crasher = python("crasher", "print('it is the <disk>'); raise SystemExit(7)")
    with supervise(tmp_path, helper, crasher, restart_budget=2) as supervisor:
        supervisor.look()
        pids = [child.pid for child in supervisor.children]
        words = r"crasher exited with 7.*launch\.restart_budget is 2"
        with pytest.raises(PartFailed, match=words) as failure:
            run(supervisor)
    assert failure.value.exit_code == 7
    assert failure.value.log_tail.endswith("it is the <disk>")
    # All three starts are in the log; the tail that is shown is of the last one alone.
    assert failure.value.log_tail.count("it is the <disk>") == 1
    crashed = supervisor.children[1].log.read_text()
    assert crashed.count("it is the <disk>") == 3
    assert running(pids) == []


def test_restarts_wait_longer_each_time_up_to_a_limit(tmp_path):
    starts = tmp_path / "starts"
    code = (
        f"import time; open({str(starts)!r}, 'a').write(f'{{time.time()}} '); raise SystemExit(1)"
    )
    settings = {"restart_backoff_seconds": 0.2, "restart_backoff_limit_seconds": 0.5}
    with (
        supervise(tmp_path, python("crasher", code), restart_budget=4, **settings) as supervisor,
        pytest.raises(PartFailed),
    ):
        run(supervisor)
    times = [float(line) for line in starts.read_text().split()]
    waits = [after - before for before, after in itertools.pairwise(times)]
    # Start-up adds up to some hundred ms on a busy machine, and takes nothing away.
    assert all(wait > least for wait, least in zip(waits, (0.2, 0.4, 0.5, 0.5), strict=True))
    assert waits[3] < 1.6, "0.2 doubled three times, had it no limit"


def test_a_configuration_error_is_not_tried_again(tmp_path):
    main = python("main", "print('vocabularies differ'); raise SystemExit(2)", ends_run=True)
    with (
        supervise(tmp_path, main) as supervisor,
        pytest.raises(PartFailed, match="settings") as failure,
    ):
        run(supervisor)
        assert supervisor.children[0].restarts == 0
    assert failure.value.exit_code == 2
    assert "vocabularies differ" in failure.value.log_tail


def test_a_part_that_fails_before_it_was_ready_ends_the_run_at_once(tmp_path):
    broken = python("broken", "raise SystemExit('no such model')", ready=lambda: False)
    with (
        supervise(tmp_path, broken) as supervisor,
        pytest.raises(PartFailed, match="before it was ready") as failure,
    ):
        run(supervisor)
    assert "no such model" in failure.value.log_tail


def test_a_part_killed_before_it_was_ready_gets_another_chance(tmp_path):
    with supervise(tmp_path, python("loading", SLEEP, ready=lambda: False)) as supervisor:
        (child,) = supervisor.children
        supervisor.look()
        os.kill(child.pid, signal.SIGKILL)
        wait_for(lambda: supervisor.look() or child.restarts)
        assert child.state in (State.RESTARTING, State.STARTING)


def test_a_part_that_never_gets_ready_is_not_waited_for_for_ever(tmp_path):
    never = python("never", SLEEP, ready=lambda: False)
    with (
        supervise(tmp_path, never, ready_timeout_seconds=0.5) as supervisor,
        pytest.raises(PartFailed, match=r"launch\.ready_timeout_seconds \(0\.5 s\)"),
    ):
        run(supervisor)


def test_a_trainer_that_may_not_be_restarted_fails_the_run(tmp_path):
    main = python("main", "raise SystemExit(1)", ends_run=True, restart=False)
    with (
        supervise(tmp_path, main) as supervisor,
        pytest.raises(PartFailed, match="main exited with 1"),
    ):
        run(supervisor)


def test_whoever_ignores_sigterm_is_killed_with_its_children(tmp_path):
    start_another = f"subprocess.Popen([sys.executable, '-c', {STUBBORN!r}])"
    code = f"import subprocess, sys; print('other', {start_another}.pid); {STUBBORN}"
    with supervise(tmp_path, python("stubborn", code), stop_grace_seconds=0.3) as supervisor:
        (child,) = supervisor.children
        supervisor.look()
        wait_for(lambda: child.log_tail().count("up") == 2)
        pids = [child.pid, int(re.search(r"other (\d+)", child.log_tail())[1])]
        assert len(running(pids)) == 2
    wait_for(lambda: running(pids) == [], 5)


def test_parts_stop_from_the_highest_stage_down(tmp_path):
    order = tmp_path / "order"
    code = (
        "import signal, sys, time\n"
        f"def stop(*_): open({str(order)!r}, 'a').write(sys.argv[1]); sys.exit()\n"
        "signal.signal(signal.SIGTERM, stop); print('up'); time.sleep(600)"
    )
    parts = [
        Part(name, [sys.executable, "-c", code, name], stage=stage)
        for stage, name in enumerate("abc")
    ]
    with supervise(tmp_path, *parts) as supervisor:
        supervisor.look()
        wait_for(lambda: all("up" in child.log_tail() for child in supervisor.children))
    assert order.read_text() == "cba"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a child to its parent")
def test_parts_die_with_a_launcher_killed_by_sigkill(tmp_path):
    code = f"""
import sys, time
from pathlib import Path
from preceptor.launch.child import Child, Part
child = Child(Part("part", [sys.executable, "-c", {STUBBORN!r}]), Path({str(tmp_path / "log")!r}))
child.start()
while "up" not in child.log_tail():
    time.sleep(0.02)
print(child.pid, flush=True)
time.sleep(600)
"""
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    pid = int(launcher.stdout.readline())
    assert running([pid]) == [pid]
    launcher.kill()
    launcher.wait()
    wait_for(lambda: running([pid]) == [], 5)
