"""Timers in a copy of fenno's scheduler plugin, for a study of where a step's time goes: `python probe.py COPY_OF_FENNO_PACKAGE`.

With the copy first on PYTHONPATH, every trial of `study.py` has in its `scheduler` figures, by the kind of step (`decode`,
`small`: up to 512 tokens with a prompt's among them, `big`: more, `idle`): `n_`, `seqs_`, `tokens_`; seconds inside vLLM's
`schedule()` (`inside_`) and with fenno's part before it (`all_`); seconds from the start of such a step to the next one's
(`t1_`), and those of the step after it (`t2_`: an engine that schedules asynchronously waits there for its result).
"""

from __future__ import annotations

import sys
from pathlib import Path

BEFORE = "        self._look()\n        self._hold()\n"
CALL = "        output = super().schedule(*args, **keywords)\n"
AFTER = '''        ended = time.perf_counter()
        count, total = len(output.num_scheduled_tokens), output.total_num_scheduled_tokens
        kind = "idle" if not total else "decode" if total == count else "small" if total <= 512 else "big"
        entered, (last, one, two) = self._entered, self.__dict__.get("_seen", (started, "idle", "idle"))
        found = {"n_" + kind: 1, "seqs_" + kind: count, "tokens_" + kind: total}
        found |= {"inside_" + kind: ended - started, "all_" + kind: ended - entered}
        for name, value in (*found.items(), ("t1_" + one, started - last), ("t2_" + two, started - last)):
            self._counts[name] += value
        self._seen = (started, kind, one)
'''


def main(package: Path) -> None:
    path = package / "vllm_plugin" / "scheduler.py"
    text = path.read_text()
    assert text.count(CALL) == text.count(BEFORE) == 1, "this is another scheduler"
    text = text.replace(BEFORE, "        self._entered = time.perf_counter()\n" + BEFORE)
    path.write_text(text.replace(CALL, "        started = time.perf_counter()\n" + CALL + AFTER))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
