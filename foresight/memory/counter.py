"""Count every byte that torch allocates on the CPU, from whatever thread, with the time and the owner of each.

torch's profiler sees allocations too, but it misses what a thread of gloo frees. So the counter is torch's CPU allocator
itself: some 50 lines of C++ that call the allocator of torch and keep a log. It is compiled once, into the cache of
compiled code.
"""

from __future__ import annotations

import ctypes
import hashlib
import shlex
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import torch

from gptscale.common.errors import ConfigError
from gptscale.ops.build import cache as build_cache
from gptscale.ops.build.cache import BuildError

SOURCE = r"""
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <atomic>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {
struct Event { int64_t address, nbytes, owner; };  // nbytes is negative where memory is freed
std::mutex mutex;
std::unordered_map<void*, int64_t> sizes;
std::vector<Event> events;
std::atomic<int64_t> owner{0};

void give_back(void* data) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto size = sizes.find(data);
    if (size != sizes.end()) {
      events.push_back({reinterpret_cast<int64_t>(data), -size->second, owner});
      sizes.erase(size);
    }
  }
  c10::free_cpu(data);
}

struct Counter final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* data = c10::alloc_cpu(n);
    if (data) {
      std::lock_guard<std::mutex> lock(mutex);
      sizes[data] = static_cast<int64_t>(n);
      events.push_back({reinterpret_cast<int64_t>(data), static_cast<int64_t>(n), owner});
    }
    return {data, data, &give_back, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
} counter;
}  // namespace

extern "C" {
void counter_begin() {
  std::lock_guard<std::mutex> lock(mutex);
  events.clear();
  sizes.clear();
  c10::SetCPUAllocator(&counter, 100);
}
void counter_end() { c10::SetCPUAllocator(c10::GetDefaultCPUAllocator(), 100); }
void counter_set_owner(int64_t number) { owner = number; }
int64_t counter_count() {
  std::lock_guard<std::mutex> lock(mutex);
  return static_cast<int64_t>(events.size());
}
void counter_read(int64_t* to, int64_t n) {
  std::lock_guard<std::mutex> lock(mutex);
  std::memcpy(to, events.data(), n * sizeof(Event));
}
}
"""


class Counter:
    """The log of the process's allocations on the CPU since `counting` began."""

    def __init__(self) -> None:
        self._library = _load()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Forget what was logged and log every allocation that follows. Only what is allocated inside is counted when freed."""
        self._library.counter_begin()
        try:
            yield
        finally:
            self._library.counter_end()

    def set_owner(self, number: int) -> None:
        """Log the allocations that follow under this number."""
        self._library.counter_set_owner(number)

    def now(self) -> int:
        """Return the number of events logged so far, which is the time of the counter."""
        return int(self._library.counter_count())

    def events(self) -> np.ndarray:
        """Return the log, (events, 3) of int64: the address, the bytes (negative where freed), and the owner's number."""
        log = np.empty((self.now(), 3), dtype=np.int64)
        self._library.counter_read(log.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(len(log)))
        return log


@cache
def _load() -> ctypes.CDLL:
    """Load the library, compile it first if it is not there, or raise ConfigError without a compiler that can."""
    digest = hashlib.sha256(f"{torch.__version__}{SOURCE}".encode()).hexdigest()[:12]
    folder = build_cache.root() / "foresight" / f"counter-{digest}"
    try:
        build_cache.build_once(folder, _compile)
    except BuildError as error:
        raise ConfigError(*error.args) from error
    library = ctypes.CDLL(str(folder / "counter.so"))
    library.counter_count.restype = ctypes.c_int64
    library.counter_set_owner.argtypes = [ctypes.c_int64]
    return library


def _compile(work: Path) -> Path:
    """Compile counter.so in `work` against torch's headers."""
    root = Path(torch.__path__[0])
    if missing := build_cache.tool_missing():
        raise BuildError(missing[0], "for the counter of memory", missing[1])
    source, library = work / "counter.cpp", work / "counter.so"
    source.write_text(SOURCE)
    compiler = shlex.split(sysconfig.get_config_var("CXX") or "c++")[0]
    words = [
        compiler,
        "-O2",
        "-std=c++20",
        "-fPIC",
        "-shared",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    words += [f"-I{root / 'include'}", str(source), "-o", str(library), f"-L{root / 'lib'}", "-lc10"]
    if reason := build_cache.compile_apart(words, work, timeout_s=600):
        fix = "apt-get install g++, or see the compiler's own words"
        raise BuildError(f"the counter of memory does not compile ({reason})", f"with {compiler}", fix)
    return work
