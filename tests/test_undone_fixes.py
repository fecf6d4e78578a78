"""Each fix of a defect has a test that fails without it.

The table undoes one fix in a copy of a package and runs the test that covers it. A row whose source has changed fails at once,
so the table follows the code.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CORE, OUTER, QUANT = "packages/ch-core", "plugins/ch-outer", "plugins/ch-quant"
PAIRS = "tests/state/test_state_pairs.py"


@dataclass(frozen=True)
class Undone:
    """One fix that is undone.

    Attributes:
        defect: what a user saw.
        package: folder of the package.
        file: the module, below the package's ``src``.
        fixed: source of the fix, once in the module.
        old: source without the fix.
        also: a second edit, as package, file, fixed and old, if two layers hold the fix.
        test: file of the test that covers the fix, and the words that select it.
    """

    defect: str
    package: str
    file: str
    fixed: str
    old: str
    test: str
    also: tuple[str, str, str, str] | None = None

    @property
    def edits(self) -> list[tuple[str, str, str, str]]:
        """All edits."""
        return [(self.package, self.file, self.fixed, self.old), *([self.also] if self.also else [])]


DEBT = (
    CORE,
    "commhooks/reduction.py",
    "        if self._owes and field == RESIDUAL:",
    "        if False:",
)
TABLE = [
    Undone(
        "warmup: codes of an 8-bit residual are read as numbers",
        CORE,
        "commhooks/encoding.py",
        "        return self.tensor if packed is None or scales is None else packed.unpack(self.tensor, scales)",
        "        return self.tensor.float()",
        PAIRS,
    ),
    Undone(
        "attach(state=): codes of an 8-bit residual are added as numbers",
        CORE,
        "commhooks/encoding.py",
        "        return self.tensor if packed is None or scales is None else packed.unpack(self.tensor, scales)",
        "        return self.tensor",
        PAIRS,
    ),
    Undone(
        "attach(state=): a residual in memory order is read in parameter order",
        CORE,
        "commhooks/encoding.py",
        "        return memory.to_own_shape(numbers)",
        "        return numbers.reshape(memory.shape)",
        PAIRS,
    ),
    Undone(
        "policy: 8-bit residuals with different blocks are unpacked with one block",
        CORE,
        "commhooks/compositions/base.py",
        "            part = self._keeper(field, param, step)\n            packed = part.packing(param, step).get(field)",
        "            part = self.parts[-1]\n            packed = part.packing(param, step).get(field)",
        PAIRS,
    ),
    Undone(
        "FSDP2: a unit that is reduced twice in a step loses or doubles its residual",
        CORE,
        "commhooks/entries.py",
        "            self.begin(self.merged())",
        "            pass",
        "packages/ch-core/tests/test_engine.py twice",
    ),
    Undone(
        "the owner of a part drops its rounding error if it did not use the parameter",
        QUANT,
        "ch_quant/quantized.py",
        "            owes = number in owned and not ctx.sends(p.name)",
        "            owes = number in owned and ctx.participating is False",
        "plugins/ch-quant/tests/test_feedback.py owner and unused",
        DEBT,
    ),
    Undone(
        "the owner of a part drops its rounding error if it has joined",
        QUANT,
        "ch_quant/quantized.py",
        "            owes = number in owned and not ctx.sends(p.name)",
        "            owes = number in owned and ctx.participating and not ctx.sends(p.name)",
        "plugins/ch-quant/tests/test_feedback.py owner and joined",
        DEBT,
    ),
    Undone(
        "fault-tolerant DDP: a parameter that only some members used drifts apart",
        "packages/ch-ft",
        "ch_ft/used_params.py",
        "        if everywhere is not None:",
        "        if everywhere is None:",
        "packages/ch-ft/tests/test_used_params.py stay_equal",
    ),
    Undone(
        "fp16 with stochastic rounding: an overflow of one rank arrives as 65504",
        CORE,
        "commhooks/rounding.py",
        "    target.copy_(torch.where(inside, rounded, values))",
        "    target.copy_(rounded)",
        "packages/ch-core/tests/test_rounding.py",
    ),
    Undone(
        "OuterOptimizer: a parameter added later is never exchanged",
        OUTER,
        "ch_outer/optimizer.py",
        "            check_parameters(self._model, self.optim, self._exchanged)\n",
        "",
        "plugins/ch-outer/tests/test_optimizer.py be_exchanged",
    ),
    Undone(
        "quant: tables take torch's default dtype",
        QUANT,
        "ch_quant/rotation.py",
        "coins.to(torch.float32)",
        "coins",
        "plugins/ch-quant/tests/test_quantized.py default_dtype",
    ),
    Undone(
        "topk, randomk: indices are made on torch's default device",
        "plugins/ch-sparse",
        "ch_sparse/chunks.py",
        'counts = torch.full((self.rows,), self.k, dtype=torch.int64, device="cpu")',
        "counts = torch.full((self.rows,), self.k, dtype=torch.int64)",
        "plugins/ch-sparse/tests/test_randomk.py default_dtype",
    ),
    Undone(
        "report() shows 1/W of the bytes of a shard axis",
        CORE,
        "commhooks/compositions/reduce_scatter.py",
        "            cut = self._known(bucket.layout) or ShardLayout.of(bucket.layout, ctx.world_size)",
        "            cut = ShardLayout.of(bucket.layout, ctx.world_size)",
        "packages/ch-core/tests/planning/test_dry_run.py scattered",
    ),
    Undone(
        "OuterOptimizer: the average of equal buffers is another number",
        OUTER,
        "ch_outer/buffers.py",
        "        parts = _exact_parts(bucket.storage)",
        "        parts = bucket.storage.clone().unsqueeze(0)",
        "plugins/ch-outer/tests/test_buffers.py equal_numbers",
    ),
    Undone(
        "FSDP2: the residual of a parameter thawed after attach is missing from the state",
        "packages/ch-fsdp",
        "ch_fsdp/fsdp2.py",
        "        return (shards_layout if self._replicates else whole_layout)(self.groups, self._names_in_state())",
        "        made = (shards_layout if self._replicates else whole_layout)(self.groups, self._names_in_state())\n"
        "        return vars(self).setdefault('_first', made)",
        "packages/ch-fsdp/tests/test_fsdp2.py thawed",
    ),
    Undone(
        "telemetry: a second recorder replaces the first",
        CORE,
        "commhooks/engine/stats.py",
        "        self.recordings.append(recording)",
        "        self.recordings = [recording]",
        "packages/ch-core/tests/test_engine.py writer",
    ),
    Undone(
        "telemetry: an exception while sampling ends one rank, and its peers wait",
        CORE,
        "commhooks/engine/stats.py",
        "                sample.sums = HostCopy(torch.stack([torch.stack(row) for row in rows]).sum(0))\n"
        "        except Exception:\n            self._stop()",
        "                sample.sums = HostCopy(torch.stack([torch.stack(row) for row in rows]).sum(0))\n"
        "        except Exception:\n            raise",
        "packages/ch-core/tests/test_engine.py sampling",
    ),
    Undone(
        "OuterOptimizer: a buffer of another shape on one rank leaves its peers in a collective",
        OUTER,
        "ch_outer/buffers.py",
        "        try:\n            return self.reducers[0].start(own, error=error).wait()",
        "        if error is not None:\n            raise error\n        try:\n"
        "            return self.reducers[0].start(own).wait()",
        "plugins/ch-outer/tests/test_buffers.py grows",
    ),
    Undone(
        "commhooks run: a closed stderr turns a successful script into exit status 1",
        CORE,
        "commhooks/log.py",
        "        stream.flush()  # type: ignore[union-attr]\n    except Exception:\n        return False",
        "        stream.flush()  # type: ignore[union-attr]\n    except Exception:\n        raise",
        "tests/launch/test_failing_writers.py closes_standard_error",
    ),
]
IDS = [undone.defect for undone in TABLE]


@pytest.mark.parametrize("undone", TABLE, ids=IDS)
def test_the_fix_is_where_the_table_says(undone: Undone) -> None:
    for package, file, fixed, _ in undone.edits:
        assert (ROOT / package / "src" / file).read_text().count(fixed) == 1
    assert (ROOT / undone.test.partition(" ")[0]).exists()


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("undone", TABLE, ids=IDS)
def test_its_test_fails_without_it(undone: Undone, tmp_path: Path) -> None:
    for package, file, fixed, old in undone.edits:
        module = shutil.copytree(ROOT / package / "src", tmp_path / package) / file
        module.write_text(module.read_text().replace(fixed, old))
    test, _, words = undone.test.partition(" ")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", "--timeout", "100", test]
    run = subprocess.run(
        [*command, *(["-k", words] if words else [])],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(str(tmp_path / edit[0]) for edit in undone.edits)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 1, run.stdout[-3000:] + run.stderr[-2000:]  # 1: tests ran, and some failed
    assert " failed" in run.stdout
