// The polynomials that kernels.h declares. They interpolate at Chebyshev's points and are computed in double at first use.
#include "kernels.h"

#include <cmath>
#include <initializer_list>

namespace gptscale {
namespace {

// The argument z(a) of the logistic variants, P(-a) = s(-z(a)), and its derivative z'(a).
double z(Gelu variant, double a) {
    double k0 = 2 * std::sqrt(2 / M_PI);
    return variant == Gelu::tanh ? k0 * (a + 0.044715 * a * a * a) : 1.702 * a;
}
double z_prime(Gelu variant, double a) {
    double k0 = 2 * std::sqrt(2 / M_PI);
    return variant == Gelu::tanh ? k0 * (1 + 3 * 0.044715 * a * a) : 1.702;
}

double p(Gelu variant, double a) {  // P(-a)
    return variant == Gelu::erf ? std::erfc(a * M_SQRT1_2) / 2 : 1 / (1 + std::exp(z(variant, a)));
}

double slope(Gelu variant, double a) {  // f'(-a) = P(-a) - a P'(a)
    double q = p(variant, a);
    if (variant == Gelu::erf) return q - a * std::exp(-a * a / 2) / std::sqrt(2 * M_PI);
    return q * (1 - a * (1 - q) * z_prime(variant, a));
}

double root(Gelu variant) {  // the zero of slope, found by bisection
    double low = 0.7, high = 0.8;
    for (int i = 0; i < 60; ++i) (slope(variant, (low + high) / 2) > 0 ? low : high) = (low + high) / 2;
    return (low + high) / 2;
}

Table make(Gelu variant, bool of_slope, int degree) {
    constexpr int MOST = 7;
    const int n = degree + 1;
    Table table = {};
    double zero = root(variant);
    table.root_high = float(zero);
    table.root_low = float(zero - table.root_high);
    for (int k = 0; k < 32; ++k) {
        double s[MOST] = {}, difference[MOST] = {}, c[MOST] = {};
        for (int j = 0; j < n; ++j) {
            s[j] = std::cos(M_PI * (2 * j + 1) / (2 * n)) / 2;
            double a = double(TABLE_WIDTH) * (k + s[j]);
            difference[j] = of_slope ? slope(variant, a) / (zero - a) : p(variant, a);
        }
        for (int order = 1; order < n; ++order)  // Newton's divided differences
            for (int j = n - 1; j >= order; --j) difference[j] = (difference[j] - difference[j - 1]) / (s[j] - s[j - order]);
        c[0] = difference[n - 1];
        for (int j = n - 2; j >= 0; --j) {  // multiply by (s - s[j]) and add the next difference
            for (int i = n - 1; i > 0; --i) c[i] = c[i - 1] - s[j] * c[i];
            c[0] = difference[j] - s[j] * c[0];
        }
        for (int i = 0; i < n; ++i) table.coefficient[i][k] = float(c[i]);
    }
    return table;
}

}  // namespace

const Table& gelu_table(Gelu variant, bool of_slope, int degree) {
    struct All {
        Table table[3][2][3];
        All() {
            for (Gelu v : {Gelu::erf, Gelu::tanh, Gelu::sigmoid})
                for (int slope = 0; slope < 2; ++slope)
                    for (int d : TABLE_DEGREES) table[int(v)][slope][d - TABLE_DEGREES[0]] = make(v, slope, d);
        }
    };
    static const All all;
    return all.table[int(variant)][of_slope][degree - TABLE_DEGREES[0]];
}

}  // namespace gptscale
