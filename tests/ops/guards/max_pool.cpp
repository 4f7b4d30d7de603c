// Calls the kernels of max_pool.inc with random windows, with their output in the middle of guarded memory.
#include "kernels.h"
#include <cstdlib>
#include <cstring>
#include <vector>
using namespace gptscale;
int main() {
    const int guard = 256;
    unsigned seed = 1;
    auto draw = [&](int n) { seed = seed * 1664525u + 1013904223u; return int((seed >> 8) % unsigned(n)); };
    for (int trial = 0; trial < 400; ++trial) {
        Dtype dtype = Dtype(trial % 4);
        int size = dtype == Dtype::f32 ? 4 : dtype == Dtype::f64 ? 8 : 2;
        bool common = trial % 3 == 0;  // the geometries that have kernels of their own
        Windows w{};
        w.channels = 1 + draw(40), w.channels_last = draw(2);
        w.kernel_h = w.kernel_w = 2 + draw(2), w.stride_h = w.stride_w = 1 + draw(2), w.dilation_h = w.dilation_w = 1;
        if (!common) w.kernel_w = 1 + draw(5), w.stride_w = 1 + draw(3), w.dilation_h = 1 + draw(2), w.dilation_w = 1 + draw(2);
        w.padding_h = draw(int(w.kernel_h / 2) + 1), w.padding_w = draw(int(w.kernel_w / 2) + 1);
        bool fours = trial % 5 == 0;  // 2x2 side by side, in rows shorter and longer than a vector
        if (fours) w.kernel_h = w.kernel_w = w.stride_h = w.stride_w = 2, w.dilation_h = w.dilation_w = 1;
        if (fours) w.padding_h = w.padding_w = 0, w.channels_last = false;
        w.height = 1 + (w.kernel_h - 1) * w.dilation_h + draw(20);
        w.width = 1 + (w.kernel_w - 1) * w.dilation_w + draw(common && !fours ? 260 : 40);
        w.out_height = (w.height + 2 * w.padding_h - w.dilation_h * (w.kernel_h - 1) - 1) / w.stride_h + 1;
        w.out_width = (w.width + 2 * w.padding_w - w.dilation_w * (w.kernel_w - 1) - 1) / w.stride_w + 1;
        int planes = w.channels_last ? 1 + draw(3) : 1 + draw(9), per = w.channels_last ? int(w.channels) : 1;
        size_t in = size_t(planes * w.height * w.width * per), out = size_t(planes * w.out_height * w.out_width * per);
        std::vector<char> x(in * size), g(out * size), y(out * size + 2 * guard, 0x5a), gx(in * size + 2 * guard, 0x5a);
        std::vector<char> at(out + 2 * guard, 0x5a);
        for (auto& c : x) c = char(draw(100));
        for (auto& c : g) c = char(draw(100));
        int8_t* offsets = (int8_t*)at.data() + guard;
        long rows = planes * w.out_height, some = rows / 2, row = w.out_width * per;
        pick(max_pool)(dtype, w, x.data(), y.data() + guard, offsets, 0, some);
        for (long i = some * row; i < rows * row; ++i)  // these may belong to another thread
            if (offsets[i] != 0x5a || y[guard + i * size] != 0x5a) return 2;
        pick(max_pool)(dtype, w, x.data(), y.data() + guard, offsets, some, rows);
        for (size_t i = 0; i < out; ++i) {
            if (offsets[i] < 0 || offsets[i] >= w.kernel_h * w.kernel_w) return 3;
            if (trial % 2) offsets[i] = int8_t(draw(256) - 128);  // from no forward: only the sum may be wrong
        }
        long half = planes * w.height / 2;
        pick(max_pool_backward)(dtype, w, g.data(), offsets, gx.data() + guard, 0, half);
        pick(max_pool_backward)(dtype, w, g.data(), offsets, gx.data() + guard, half, planes * w.height);
        for (auto* v : {&y, &gx, &at})
            for (int i = 0; i < guard; ++i)
                if ((*v)[i] != 0x5a || (*v)[v->size() - 1 - i] != 0x5a) return 1;
    }
    return 0;
}
