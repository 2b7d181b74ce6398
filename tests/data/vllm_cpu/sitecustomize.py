"""On PYTHONPATH of a vLLM CPU replica: asks Linux for the AMX tile state (ARCH_REQ_XCOMP_PERM, XTILEDATA).

vLLM 0.32 skips its warm-up when --enforce-eager and an explicit KV size are both given. A short first prompt then
reaches the AMX attention kernel before oneDNN has asked for the state, and the engine dies of SIGILL.
"""

import ctypes
import platform

SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18

if platform.system() == "Linux" and platform.machine() == "x86_64":
    ctypes.CDLL(None).syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
