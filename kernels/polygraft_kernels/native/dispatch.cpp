// What does not depend on the instruction set: which ones this processor runs, and scratch memory.
#include <stdlib.h>
#include <string.h>

#include "abi.h"

namespace {

struct Workspace {
    void* memory = nullptr;
    size_t size = 0;
    ~Workspace() { free(memory); }

    void* of(size_t bytes) {
        if (bytes > size) {
            free(memory);
            size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
            memory = aligned_alloc(4096, size);
            if (memory == nullptr) abort();  // the kernel has killed for less
        }
        return memory;
    }
};

thread_local Workspace workspace, parts;

}  // namespace

extern "C" void* pg_workspace(size_t bytes) { return workspace.of(bytes); }

extern "C" void* pg_zeroed_parts(size_t bytes) { return memset(parts.of(bytes), 0, bytes); }

// 1 if this processor and its operating system can run unit `isa`, by cpuid.
extern "C" __attribute__((visibility("default"))) int pg_runs(int isa) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    switch (isa) {
        case 0: return 1;
        case 1: return avx2;
        case 2: return avx512;
        case 3: return avx512 && __builtin_cpu_supports("avx512bf16");
    }
#endif
    return isa == 0;
}
