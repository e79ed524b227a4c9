"""The interpreter's warm heap: objects created in a loop touch no new page."""

from __future__ import annotations

from conftest import Run

SCRIPT = """
    import resource
    from unimem.system.heap import warm_python_heap

    made = [None] * 1000

    def faults_of_objects():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for i in range(1000):
            made[i] = float(i) / 3
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    kept = [float(i) for i in range(50_000)]  # what the start has left over is used up
    faults_of_objects()  # Python meets each line for the first time
    kept += made  # what it has touched stays in use
    cold = faults_of_objects()
    kept += made
    warm_python_heap()
    print(cold, faults_of_objects())
"""


def test_objects_of_a_loop_touch_no_new_page(run_python: Run) -> None:
    # The kernel may move a page, which rarely adds a fault.
    for _ in range(4):
        done = run_python(SCRIPT)
        assert done.returncode == 0, done.stderr
        cold, warm = map(int, done.stdout.split())
        if warm == 0:
            break
    assert cold > 0
    assert warm == 0
