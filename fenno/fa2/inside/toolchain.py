"""Prints what an interpreter could build a CUDA extension with, as one line of JSON."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path


def cuda_home() -> str | None:
    """The toolkit: CUDA_HOME, the nvcc on PATH, or the one that NVIDIA's packages put beside torch."""
    named, found = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"), shutil.which("nvcc")
    if named:
        return named
    if found:
        # What lies on PATH may be a script that starts the real one.
        said = subprocess.run(
            [found, "--dryrun", "-x", "cu", "-c", "/dev/null"], capture_output=True, text=True, check=False
        ).stderr
        top = re.search(r"^#\$ TOP=(.+)$", said, re.MULTILINE)
        return str(Path(top[1]).resolve()) if top else str(Path(found).resolve().parents[1])
    places = [Path(folder, "nvidia") for folder in sys.path]
    return next((str(path.parents[1]) for place in places for path in sorted(place.glob("*/bin/nvcc"))), None)


def nvcc_version(home: str | None) -> str | None:
    """ "13.0.88", or None when there is no nvcc that runs."""
    if home is None:
        return None
    try:
        said = subprocess.run([str(Path(home, "bin", "nvcc")), "--version"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return None
    match = re.search(r"release (\d+\.\d+)(?:, V([\d.]+))?", said)
    return (match[2] or match[1]) if match else None


def compiler() -> str | None:
    """ "g++ 12.2.0", or None when there is no C++ compiler."""
    named = os.environ.get("CXX", "g++")
    try:
        said = subprocess.run([named, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return None
    return f"{Path(named).name} {said.strip()}"


def headers() -> bool:
    """Whether a C++ compiler finds Python.h: some systems have it in a package of its own."""
    places = [sysconfig.get_path("include"), *os.environ.get("CPLUS_INCLUDE_PATH", "").split(os.pathsep)]
    return any(place and Path(place, "Python.h").is_file() for place in places)


def absent() -> list[str]:
    """What pip would have to install: torch's builder runs ninja, and setuptools makes wheels by itself since 70.1."""
    modern = importlib.util.find_spec("setuptools") and importlib.util.find_spec("setuptools.command.bdist_wheel")
    ninja = shutil.which("ninja", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    return [name for name, there in (("ninja", ninja), ("setuptools>=70.1", modern)) if not there]


def main() -> None:
    torch = __import__("torch") if importlib.util.find_spec("torch") else None
    home = cuda_home()
    print(
        json.dumps(
            {
                "python": f"cp{sys.version_info[0]}{sys.version_info[1]}",
                "torch": str(torch.__version__) if torch else None,
                "torch_cuda": torch.version.cuda if torch else None,
                "abi": bool(torch.compiled_with_cxx11_abi()) if torch else None,
                "libraries": str(Path(str(torch.__file__)).parent / "lib") if torch else None,
                "cuda_home": home,
                "nvcc": nvcc_version(home),
                "compiler": compiler(),
                "headers": headers(),
                "absent": absent(),
            }
        )
    )


if __name__ == "__main__":
    main()
