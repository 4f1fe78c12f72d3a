// Products of a few rows with a small matrix. The matrix comes in panels of kPanel columns, whose rows
// follow each other in memory: [panel][row][kPanel]; what a last panel lacks is zero.
#pragma once

#include "grid.h"

namespace calipers {
namespace {

constexpr int kPanelVectors = kPanel / W;
constexpr int kSums = 12;                        // vectors that stay in registers
constexpr int kTogetherRows = kSums / kPanelVectors;

// Rows that are multiplied at once; those that are missing repeat the first.
struct RowsOfFloats {
  const float* row[kTogetherRows];
  RowsOfFloats(const float* const* rows, std::int64_t count) {
    for (int i = 0; i < kTogetherRows; i++) row[i] = rows[i < count ? i : 0];
  }
};

using Sums = V[kTogetherRows][kPanelVectors];

// sums = rows[begin, end) · panel[begin, end)
[[gnu::always_inline]] inline void multiply(const RowsOfFloats& rows, const float* panel,
                                            std::int64_t length, Sums& sums) {
  each<kTogetherRows>([&](int i) { each<kPanelVectors>([&](int v) { sums[i][v] = V{}; }); });
  for (std::int64_t k = 0; k < length; k++) {
    V right[kPanelVectors];
    each<kPanelVectors>([&](int v) { right[v] = load_as<V>(panel + k * kPanel + v * W); });
    each<kTogetherRows>([&](int i) {
      const V left = all(rows.row[i][k]);
      each<kPanelVectors>([&](int v) { sums[i][v] += left * right[v]; });
    });
  }
}

// to[i] += rows[i] · matrix, for rows of `length` and a matrix of `panels`, `pitch` floats apart.
inline void add_products(const float* const* rows, float* const* to, std::int64_t count,
                         std::int64_t length, const float* matrix, std::int64_t panels,
                         std::int64_t pitch) {
  for (std::int64_t first = 0; first < count; first += kTogetherRows) {
    const std::int64_t left = count - first < kTogetherRows ? count - first : kTogetherRows;
    const RowsOfFloats some(rows + first, left);
    for (std::int64_t panel = 0; panel < panels; panel++) {
      Sums sums;
      multiply(some, matrix + panel * pitch, length, sums);
      for (std::int64_t i = 0; i < left; i++)
        each<kPanelVectors>([&](int v) {
          float* at = to[first + i] + panel * kPanel + v * W;
          store(at, load_as<V>(at) + sums[i][v]);
        });
    }
  }
}

inline float total_of(V x) {
  float total = 0;
  for (int i = 0; i < W; i++) total += x[i];
  return total;
}

// forms[i] = rows[i] · matrix · rows[i]ᵀ, for an upper triangular matrix of panels.
inline void quadratic_forms(const float* const* rows, std::int64_t count, const float* matrix,
                            std::int64_t panels, std::int64_t pitch, float* forms) {
  for (std::int64_t first = 0; first < count; first += kTogetherRows) {
    const std::int64_t left = count - first < kTogetherRows ? count - first : kTogetherRows;
    const RowsOfFloats some(rows + first, left);
    V form[kTogetherRows] = {};
    for (std::int64_t panel = 0; panel < panels; panel++) {
      Sums sums;
      multiply(some, matrix + panel * pitch, (panel + 1) * kPanel, sums);
      each<kTogetherRows>([&](int i) {
        each<kPanelVectors>([&](int v) {
          form[i] += sums[i][v] * load_as<V>(some.row[i] + panel * kPanel + v * W);
        });
      });
    }
    for (std::int64_t i = 0; i < left; i++) forms[first + i] = total_of(form[i]);
  }
}

inline float dot(const float* a, const float* b, std::int64_t panels) {
  V sum[kPanelVectors] = {};
  for (std::int64_t at = 0; at < panels * kPanel; at += kPanel)
    each<kPanelVectors>(
        [&](int v) { sum[v] += load_as<V>(a + at + v * W) * load_as<V>(b + at + v * W); });
  V total = sum[0];
  for (int v = 1; v < kPanelVectors; v++) total += sum[v];
  return total_of(total);
}

}  // namespace
}  // namespace calipers
