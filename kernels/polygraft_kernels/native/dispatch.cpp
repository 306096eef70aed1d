// What does not depend on the instruction set: which ones this processor runs, and scratch memory.
#include <stdlib.h>

#include "abi.h"

namespace {

struct Workspace {
    void* memory = nullptr;
    size_t size = 0;
    ~Workspace() { free(memory); }
};

thread_local Workspace workspace;

}  // namespace

extern "C" void* pg_workspace(size_t bytes) {
    if (bytes > workspace.size) {
        free(workspace.memory);
        workspace.size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
        workspace.memory = aligned_alloc(4096, workspace.size);
        if (workspace.memory == nullptr) abort();  // the kernel has killed for less
    }
    return workspace.memory;
}

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
