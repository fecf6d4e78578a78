"""Files on a full disk, for which a limit on the size of files stands."""

import subprocess
import sys
from pathlib import Path

CODE = """
import resource
from pathlib import Path
from commhooks import why_unwritable, write_whole

write_whole(Path("old.json"), "old")
assert [why_unwritable(Path(name), folder=True) for name in (".", "missing/deep")] == ["", ""]
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
assert [why_unwritable(Path(name)).startswith("File too large") for name in ("old.json", "missing/new.json")] == [True, True]
try:
    write_whole(Path("old.json"), "new" * 1000)
except OSError as error:
    print(error.strerror)
"""


def test_a_full_disk_destroys_no_older_file_and_is_seen_before(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-B", "-c", CODE], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "File too large\n"), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"] and (tmp_path / "old.json").read_text() == "old"
