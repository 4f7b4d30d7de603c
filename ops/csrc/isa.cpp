// The choice of the instruction set for this process. GPTSCALE_ISA=baseline|avx2 lowers it, for a test or for a user in doubt.
#include "kernels.h"

#include <cstdlib>
#include <cstring>

namespace gptscale {

int isa_level() {
    static const int level = [] {
        int found = 0;
#ifdef GPTSCALE_X86
        bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
        bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
        found = v4 ? 2 : v3 ? 1 : 0;
        const char* asked = std::getenv("GPTSCALE_ISA");
        if (asked && !std::strcmp(asked, "baseline")) found = 0;
        if (asked && !std::strcmp(asked, "avx2") && found > 1) found = 1;
#endif
        return found;
    }();
    return level;
}

}  // namespace gptscale
