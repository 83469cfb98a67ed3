"""Which hardware an answer belongs to: two machines apart, one machine the same every time."""

from __future__ import annotations

import itertools
import platform

import jax
import jax.numpy as jnp
import jaxlib.version
import pytest
from support.kernels import A100, H100

from asel import Invocation, Kernel, device_fingerprint
from asel.kernels.devices import HOST_CPU, default_device, describe_cpu, environment, platform_of
from asel.kernels.key_memo import KeyMemo
from asel.runtime.jax_settings import Settings, current_settings
from asel.testing import FakeDevice

SKYLAKE = """\
processor	: 0
vendor_id	: GenuineIntel
cpu family	: 6
model		: 85
model name	: Intel(R) Xeon(R) CPU @ 2.00GHz
stepping	: 3
microcode	: 0xffffffff
cpu MHz		: 2000.176
cache size	: 39424 KB
siblings	: 2
core id		: 0
flags		: fpu vme de pse tsc msr sse sse2 ht ssse3 fma sse4_1 sse4_2 avx f16c avx2 avx512f avx512dq avx512bw
bugs		: cpu_meltdown spectre_v1
bogomips	: 4000.35

processor	: 1
vendor_id	: GenuineIntel
cpu family	: 6
model		: 85
model name	: Intel(R) Xeon(R) CPU @ 2.00GHz
stepping	: 3
cpu MHz		: 2000.176
flags		: fpu vme de pse tsc msr sse sse2 ht ssse3 fma sse4_1 sse4_2 avx f16c avx2 avx512f avx512dq avx512bw
bogomips	: 4000.35
"""
# The name that this cloud gives to several generations.
BROADWELL = SKYLAKE.replace("model		: 85", "model		: 79").replace(" avx512f avx512dq avx512bw", "")
SAPPHIRE = """\
processor	: 0
vendor_id	: GenuineIntel
cpu family	: 6
model		: 143
model name	: Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz
stepping	: 8
cpu MHz		: 2700.000
flags		: fpu sse4_2 avx avx2 avx512f avx512_bf16 amx_bf16 avx512_fp16 amx_tile amx_int8
"""
MILAN = """\
processor	: 0
vendor_id	: AuthenticAMD
cpu family	: 25
model		: 1
model name	: AMD EPYC 7B13
stepping	: 0
cpu MHz		: 2449.998
flags		: fpu vme sse4_1 sse4_2 avx f16c avx2 sha_ni vaes vpclmulqdq
"""
GENOA = """\
processor	: 0
vendor_id	: AuthenticAMD
cpu family	: 25
model		: 17
model name	: AMD EPYC 9B14
stepping	: 1
flags		: fpu sse4_2 avx avx2 avx512f avx512_bf16
"""
GRAVITON2 = """\
processor	: 0
BogoMIPS	: 243.75
Features	: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs
CPU implementer	: 0x41
CPU architecture: 8
CPU variant	: 0x3
CPU part	: 0xd0c
CPU revision	: 1
"""
GRAVITON3 = """\
processor	: 0
BogoMIPS	: 2100.00
Features	: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid sve bf16 i8mm
CPU implementer	: 0x41
CPU architecture: 8
CPU variant	: 0x1
CPU part	: 0xd40
CPU revision	: 1
"""
CPUS = {
    "Skylake": SKYLAKE,
    "Broadwell": BROADWELL,
    "Sapphire Rapids": SAPPHIRE,
    "Milan": MILAN,
    "Genoa": GENOA,
    "Graviton 2": GRAVITON2,
    "Graviton 3": GRAVITON3,
}


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(CPUS, 2)))
def test_two_cpu_models_have_different_fingerprints(one, other):
    """JAX calls them all "cpu", but a config tuned on one may be slow on another (ejKernel's defect 11)."""
    assert describe_cpu(CPUS[one], 8) != describe_cpu(CPUS[other], 8)


@pytest.mark.parametrize(
    ("cpuinfo", "cores", "expected"),
    [
        (SKYLAKE, 2, "Intel(R) Xeon(R) CPU @ 2.00GHz, 6/85/3, 2 cores, avx512f+avx2+avx+sse4_2"),
        (SAPPHIRE, 8, "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz, 6/143/8, 8 cores, "
         "amx_tile+avx512_bf16+avx512f+avx2+avx+sse4_2"),
        (MILAN, 16, "AMD EPYC 7B13, 25/1/0, 16 cores, avx2+avx+sse4_2"),
        (GRAVITON3, 4, "0x41 0xd40 0x1, 4 cores, sve+asimd"),
    ],
    ids=["Intel", "Intel with AMX", "AMD", "ARM"],
)  # fmt: skip
def test_a_cpu_is_described_by_model_cores_and_vector_features(cpuinfo, cores, expected):
    """Readable text that does not change from boot to boot."""
    assert describe_cpu(cpuinfo, cores) == expected


def test_the_number_of_cores_matters():
    """The best block sizes differ between half a machine and a whole one."""
    assert len({describe_cpu(MILAN, cores) for cores in (1, 2, 4, 8)}) == 4


def test_vector_features_that_a_hypervisor_hides_matter():
    """The same model runs different code without AVX-512."""
    assert describe_cpu(SKYLAKE, 2) != describe_cpu(SKYLAKE.replace(" avx512f", ""), 2)


def test_a_fingerprint_ignores_current_clock_speeds():
    """Clock frequency, bogomips, microcode and spaces do not decide which config wins."""
    later = SKYLAKE.replace("2000.176", "2800.002").replace("4000.35", "4000.40").replace("0xffffffff", "0x1")
    assert describe_cpu(later, 2) == describe_cpu(SKYLAKE, 2)
    spaced = MILAN.replace("AMD EPYC 7B13", "AMD  EPYC   7B13  ")
    assert describe_cpu(spaced, 2) == describe_cpu(MILAN, 2)


@pytest.mark.parametrize("text", ["", "\n\n", "no colon here", "processor : 0\n"])
def test_a_machine_without_cpuinfo_is_described_by_python(text):
    """Outside Linux there is still a description, with the number of cores."""
    described = describe_cpu(text, 3)
    assert "3 cores" in described
    assert platform.machine() in described
    assert described != describe_cpu(text, 4)


# --- fingerprints ------------------------------------------------------------------------------


def test_the_fingerprint_of_this_machine_has_the_cpu_model():
    """`cpu|cpu` would make every CPU the same."""
    fingerprint = device_fingerprint()
    assert fingerprint.startswith(f"cpu {HOST_CPU}|")
    assert "cores" in fingerprint


def test_a_fingerprint_is_the_same_every_time():
    """It is part of keys on disk."""
    assert device_fingerprint() == device_fingerprint(jax.devices()[0]) == device_fingerprint(default_device())
    assert device_fingerprint(H100) == device_fingerprint(FakeDevice("NVIDIA H100"))


def test_equal_hardware_shares_a_fingerprint_and_other_hardware_does_not():
    """Kind and driver count; the index of a card does not."""
    assert device_fingerprint(FakeDevice("NVIDIA H100", id=0)) == device_fingerprint(FakeDevice("NVIDIA H100", id=7))
    others = [
        H100,
        A100,
        FakeDevice("NVIDIA H100", platform_version="cuda 12.8"),
        FakeDevice("TPU v5e", "tpu"),
        FakeDevice("cpu", "cpu"),
    ]
    assert len({device_fingerprint(dev) for dev in others}) == len(others)


def test_separators_inside_fields_of_a_fingerprint_are_escaped():
    """Otherwise a separator inside a name could be mistaken for the end of a field (ejKernel's defect 11)."""
    one, other = FakeDevice("A|B", platform_version="C"), FakeDevice("A", platform_version="B|C")
    assert device_fingerprint(one) != device_fingerprint(other)


def test_a_fingerprint_is_one_line():
    """Drivers report versions over several lines; logs and file names need one line."""
    fingerprint = device_fingerprint(FakeDevice("TPU v4", "tpu", platform_version="libtpu\n  built on\tMonday\n"))
    assert fingerprint == "TPU v4|libtpu built on Monday"


def test_a_device_with_few_attributes_has_a_fingerprint():
    """Attributes that a plugin's device does not have are left out."""

    class Bare:
        platform = "metal"

    assert device_fingerprint(Bare()) == "metal|"
    assert device_fingerprint(object()) == "unknown|"


def test_the_fingerprint_follows_the_device_the_arguments_live_on():
    """A machine may have several kinds of devices; a call belongs to the one it would run on."""
    memo, kernel = KeyMemo(), Kernel("k")

    def device_of(*args, **kwargs):
        return memo.resolve(Invocation("k", args, kwargs), kernel).key.device

    assert device_of(H100.array((8,))) == device_fingerprint(H100)
    assert device_of(1, {"q": [A100.array((8,))]}) == device_fingerprint(A100)
    assert device_of(q=A100.array((8,))) == device_fingerprint(A100)
    assert device_of(jnp.zeros(8)) == device_of(1) == device_fingerprint()
    # The same call, on another device, again: the memo does not mix them up.
    assert device_of(H100.array((8,))) == device_fingerprint(H100)


# --- platform, settings, environment -----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpu", "gpu"),
        ("cuda", "gpu"),
        ("rocm", "gpu"),
        ("CUDA", "gpu"),
        ("tpu", "tpu"),
        ("cpu", "cpu"),
        ("METAL", "metal"),
    ],
)
def test_platforms_have_the_names_of_method_variants(name, expected):
    """CUDA and ROCm are both `run_gpu`."""
    assert platform_of(FakeDevice("any", name)) == expected


def test_a_device_without_a_platform_is_unknown():
    """It has no variants, and no error."""
    assert platform_of(object()) == "unknown"


def test_the_default_device_is_the_one_jax_would_use():
    """Whether it is set as a device, as a platform's name, or not at all."""
    first = jax.local_devices()[0]
    assert default_device() == first
    with jax.default_device("cpu"):
        assert default_device() == jax.local_devices(backend="cpu")[0]
    with jax.default_device(first):
        assert default_device() is first


def test_current_settings_are_those_of_the_calling_thread():
    """JAX keeps them per thread and per scope."""
    before = current_settings()
    assert before == Settings(x64=False, matmul_precision=None, default_device=None)
    with jax.enable_x64(True), jax.default_matmul_precision("float32"), jax.default_device(jax.devices()[0]):
        assert current_settings() == Settings(True, "float32", jax.devices()[0])
    with jax.default_prng_impl("rbg"), jax.debug_nans(True):
        assert dict(current_settings().others) == {"default_prng_impl": "rbg", "debug_nans": True}
    assert current_settings() == before


def test_the_environment_names_the_software_of_a_measurement():
    """Records made with another jax, jaxlib or driver have another environment."""
    assert environment(H100) == {
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "platform_version": "fake",
    }
