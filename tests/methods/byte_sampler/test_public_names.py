"""The names the package offers are what its page shows, whatever was imported before."""

import subprocess
import sys


def test_every_name_is_itself_after_its_module_was_imported():
    code = (
        "import lmsmith.methods.byte_sampler as b\n"
        "import lmsmith.methods.byte_sampler.bench\n"
        "assert all(type(getattr(b, name)).__name__ != 'module' for name in b.__all__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
