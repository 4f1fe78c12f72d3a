// The table and the polynomial by which kernels raise errors to a norm.
#pragma once

#include <cmath>
#include <vector>

#include "jobs.h"

namespace calipers {

// The polynomial through x^exponent at the Chebyshev nodes of [1, 2], from the highest coefficient.
inline std::vector<double> interpolate_power(double exponent) {
  constexpr int n = Power::degree + 1;
  double node[n], divided[n];
  for (int i = 0; i < n; i++) {
    node[i] = 1.5 + 0.5 * std::cos(std::acos(-1.0) * (i + 0.5) / n);
    divided[i] = std::pow(node[i], exponent);
  }
  for (int order = 1; order < n; order++)
    for (int i = n - 1; i >= order; i--)
      divided[i] = (divided[i] - divided[i - 1]) / (node[i] - node[i - order]);
  std::vector<double> coefficients{divided[n - 1]};
  for (int i = n - 2; i >= 0; i--) {  // times (x − node), plus the next
    coefficients.push_back(divided[i]);
    for (std::size_t k = coefficients.size() - 1; k >= 1; k--)
      coefficients[k] -= node[i] * coefficients[k - 1];
  }
  return coefficients;
}

inline Power power_of(double norm) {
  Power power{};
  power.squares = norm <= 4 ? 0 : static_cast<int>(std::ceil((norm - 4) / 2));
  const double exponent = norm - 2 * power.squares;
  const std::vector<double> coefficients = interpolate_power(exponent);
  for (std::size_t i = 0; i < coefficients.size(); i++)
    power.coefficients[i] = static_cast<float>(coefficients[i]);
  // Values are below 2⁸, so that biased exponents run from 103 to 134; at 103, the last of an eight,
  // they count as zero.
  for (int biased = 104; biased <= 134; biased++)
    power.octaves[biased % 32] = static_cast<float>(std::exp2((biased - 127) * exponent));
  for (int i = 0; i < 8; i++) power.fine[i] = static_cast<float>(std::exp2(i * exponent));
  for (int eight = 13; eight <= 16; eight++)
    power.coarse[eight % 8] = static_cast<float>(std::exp2((8 * eight - 127) * exponent));
  return power;
}

}  // namespace calipers
