"""What the releases that the article names have in their sources, and what they have not.

    pip download --no-deps vllm==0.4.2 transformers==4.41.2
    FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE pip download --no-deps --no-build-isolation --no-binary :all: flash-attn==2.5.8
    python benchmarks/article/sources.py FOLDER

The second needs a torch beside it; FOLDER is where the three files are. Nothing is installed, and nothing of it is run. One line a
look-up, with the number of its claim in docs/article.md; the same goes to results/sources.json.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

FA, VLLM, HF = "flash_attn-2.5.8*", "vllm-0.4.2*", "transformers-4.41.2*"
API = "csrc/flash_attn/flash_api.cpp"


@dataclass(frozen=True)
class Look:
    """Count the lines that match `pattern` in the files of `package` whose path matches `path`; without a pattern, the files."""

    claim: int
    package: str
    path: str
    pattern: str = ""


LOOKS = (
    Look(1, FA, r"csrc/flash_attn/|flash_attn/|setup\.py$", r"(?i)softcap"),
    Look(1, VLLM, r"\.py$", r"(?i)grok"),
    Look(1, HF, r"\.py$", r"(?i)grok"),
    Look(3, FA, r"setup\.py$|csrc/flash_attn/", r"(?i)fused.softmax"),
    Look(3, FA, r"csrc/flash_attn/|flash_attn/", r"(?i)dp4a"),
    Look(4, FA, r"src/flash_api\.cpp$"),
    Look(4, FA, rf"{API}$", r"__CUDA_ARCH__"),
    Look(5, FA, r"flash_fwd_kernel\.cuh$"),
    Look(5, FA, r"csrc/flash_attn/", r"\bBLOCK_[MN]\b"),
    Look(7, FA, r"setup\.py$", r"--cuda_version|--arch\b"),
    Look(8, FA, r"setup\.py$", r"TORCH_CUDA_ARCH_LIST"),
    Look(8, FA, r"setup\.py$", r"code=sm_(80|90)"),
    Look(9, FA, r"README\.md$", r"PyTorch 1\.12 and above"),
    Look(10, FA, r"setup\.py$", r'parse\("12\.2"\)'),
    Look(15, VLLM, r"vllm/config\.py$", r"total_num_kv_heads // parallel_config\.tensor_parallel_size"),
    Look(16, HF, r"\.py$", r"kv_cache_contiguous"),
    Look(17, VLLM, r"paged_attn\.py$", r"return \(2, num_blocks, block_size \* num_kv_heads \* head_size\)"),
    Look(17, VLLM, r"vllm/(core|attention|worker)/.*\.py$", r"torch\.cat\(.*(key|value)_cache"),
    Look(20, VLLM, r"\.py$", r"(?i)autocast"),
    Look(22, VLLM, r"vllm/scheduler/"),
    Look(22, VLLM, r"\.py$", r"(?i)scheduler.policy"),
    Look(22, VLLM, r"llm_engine\.py$", r"self\.scheduler = Scheduler\("),
    Look(23, VLLM, r"vllm/config\.py$", r"max\(max_model_len, 2048\)"),
    Look(24, VLLM, r"arg_utils\.py$", r"choices=\[8, 16, 32\]"),
    Look(25, VLLM, r"arg_utils\.py$", r"gpu_memory_utilization: float = 0\.90"),
    Look(27, VLLM, r"entrypoints/api_server\.py$", r"used only for demonstrating"),
    Look(40, VLLM, r"METADATA$", r"Requires-Dist: torch ==2\.3\.0"),
)


def files(archive: Path) -> Iterator[tuple[str, str]]:
    """Path and text of every file of a wheel or a source archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            yield from ((name, wheel.read(name).decode(errors="replace")) for name in wheel.namelist())
        return
    with tarfile.open(archive) as source:
        for member in source:
            if member.isfile() and (file := source.extractfile(member)):
                yield member.name.partition("/")[2], file.read().decode(errors="replace")


def main(folder: Path) -> None:
    archives = {name: next(iter(sorted(folder.glob(name))), None) for name in (FA, VLLM, HF)}
    if missing := [name for name, path in archives.items() if path is None or not path.is_file()]:
        sys.exit(f"not in {folder}: {', '.join(missing)}")
    found = dict.fromkeys(LOOKS, 0)
    for name, archive in archives.items():
        assert archive
        for path, text in files(archive):
            for look in (each for each in LOOKS if each.package == name and re.search(each.path, path)):
                found[look] += len(re.findall(look.pattern, text)) if look.pattern else 1
    rows = [
        {"claim": look.claim, "package": look.package.rstrip("*"), "files": look.path, "pattern": look.pattern, "found": count}
        for look, count in found.items()
    ]
    for row in rows:
        print("{claim:>3}  {package:20} {files:45} {pattern:50} {found}".format(**row))
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in archives.values() if path}
    document = {"date": datetime.now(timezone.utc).date().isoformat(), "archives": hashes, "found": rows}
    (results := Path(__file__).with_name("results")).mkdir(exist_ok=True)
    (results / "sources.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
