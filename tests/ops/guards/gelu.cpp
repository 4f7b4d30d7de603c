// Calls the kernels of gelu.inc with their output in the middle of guarded memory.
#include "kernels.h"
#include <cstdlib>
#include <cstring>
#include <vector>
using namespace gptscale;
int check(Dtype dtype) {
    int size = dtype == Dtype::f32 ? 4 : 2, guard = 256;
    for (int n : {0, 1, 15, 16, 17, 63, 64, 65, 1023, 1024, 1025, 3000}) {
        for (int wide = 0; wide < 2; ++wide) {
            std::vector<char> x(n * size + 1), g(n * size + 1), y(n * size + 2 * guard, 0x5a), gx(y);
            for (int i = 0; i < n; ++i) {
                float v = (i % 7 - 3) * (wide ? 5.0f : 0.5f);
                unsigned u;
                memcpy(&u, &v, 4);
                unsigned short b = u >> 16;  // as fp16 it is another number, which is good enough
                memcpy(&x[i * size], size == 4 ? (void*)&v : (void*)&b, size);
                memcpy(&g[i * size], size == 4 ? (void*)&v : (void*)&b, size);
            }
            std::vector<float> bias(n, 0.25f), sums(n + 128, 1.5f);
            pick(gelu)(Gelu::erf, dtype, x.data(), y.data() + guard, n);
            pick(gelu_backward)(Gelu::tanh, dtype, g.data(), x.data(), gx.data() + guard, n);
            pick(bias_gelu)(Gelu::erf, dtype, x.data(), bias.data(), y.data() + guard, 1, n);
            pick(bias_gelu_backward)(Gelu::sigmoid, dtype, g.data(), x.data(), bias.data(), gx.data() + guard,
                                     sums.data() + 64, 1, n);
            for (auto* v : {&y, &gx})
                for (int i = 0; i < guard; ++i)
                    if ((*v)[i] != 0x5a || (*v)[v->size() - 1 - i] != 0x5a) return 1;
            for (int i = 0; i < 64; ++i)
                if (sums[i] != 1.5f || sums[n + 64 + i] != 1.5f) return 2;
        }
    }
    return 0;
}
int main() {
    for (Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16})
        if (int wrong = check(dtype)) return wrong;
    return 0;
}
