// Products of a few rows with a small matrix. The matrix comes in panels of kPanel columns, whose rows
// follow each other in memory: [panel][row][kPanel]; what a last panel lacks is zero.
#pragma once

#include "grid.h"

namespace calipers {
namespace {

constexpr int kPanels = W > kPanel / 2 ? 2 : 1;          // that are multiplied at once
constexpr int kPanelVectors = kPanel / W;
constexpr int kVectors = kPanels * kPanelVectors;
constexpr int kSums = 12;                                // vectors that stay in registers
constexpr int kTogetherRows = kSums / kVectors;

// A matrix of panels that are `pitch` floats apart.
struct Panels {
  const float* data;
  std::int64_t count, pitch;
};

// Rows that are multiplied at once; those that are missing repeat the first.
struct RowsOfFloats {
  const float* row[kTogetherRows];
  RowsOfFloats(const float* const* rows, std::int64_t count) {
    for (int i = 0; i < kTogetherRows; i++) row[i] = rows[i < count ? i : 0];
  }
};

using Sums = V[kTogetherRows][kVectors];

// sums = rows[0, length) · kPanels panels; one that does not exist repeats the first.
[[gnu::always_inline]] inline void multiply(const RowsOfFloats& rows, const Panels& matrix,
                                            std::int64_t panel, std::int64_t length, Sums& sums) {
  const float* first = matrix.data + panel * matrix.pitch;
  const float* last = panel + 1 < matrix.count ? first + (kPanels - 1) * matrix.pitch : first;
  each<kTogetherRows>([&](int i) { each<kVectors>([&](int v) { sums[i][v] = V{}; }); });
  for (std::int64_t k = 0; k < length; k++) {
    V right[kVectors];
    each<kPanelVectors>([&](int v) {
      right[v] = load_as<V>(first + k * kPanel + v * W);
      right[kVectors - kPanelVectors + v] = load_as<V>(last + k * kPanel + v * W);
    });
    each<kTogetherRows>([&](int i) {
      const float left = rows.row[i][k];
      each<kVectors>([&](int v) { sums[i][v] += left * right[v]; });
    });
  }
}

// Call f with each group of panels: the first one, and how many vectors there are of them.
template <class F> [[gnu::always_inline]] inline void each_panels(const Panels& matrix, F f) {
  for (std::int64_t panel = 0; panel < matrix.count; panel += kPanels)
    f(panel, panel + kPanels <= matrix.count ? kVectors : kPanelVectors);
}

// to[i] += rows[i] · matrix, for rows of `length`.
inline void add_products(const float* const* rows, float* const* to, std::int64_t count,
                         std::int64_t length, const Panels& matrix) {
  for (std::int64_t first = 0; first < count; first += kTogetherRows) {
    const std::int64_t left = count - first < kTogetherRows ? count - first : kTogetherRows;
    const RowsOfFloats some(rows + first, left);
    each_panels(matrix, [&](std::int64_t panel, int vectors) {
      Sums sums;
      multiply(some, matrix, panel, length, sums);
      for (std::int64_t i = 0; i < left; i++)
        for (int v = 0; v < vectors; v++) {
          float* at = to[first + i] + panel * kPanel + v * W;
          store(at, load_as<V>(at) + sums[i][v]);
        }
    });
  }
}

inline float total_of(V x) {
  float total = 0;
  for (int i = 0; i < W; i++) total += x[i];
  return total;
}

// forms[i] = rows[i] · matrix · rows[i]ᵀ, for an upper triangular matrix.
inline void quadratic_forms(const float* const* rows, std::int64_t count, const Panels& matrix,
                            float* forms) {
  for (std::int64_t first = 0; first < count; first += kTogetherRows) {
    const std::int64_t left = count - first < kTogetherRows ? count - first : kTogetherRows;
    const RowsOfFloats some(rows + first, left);
    V form[kTogetherRows] = {};
    each_panels(matrix, [&](std::int64_t panel, int vectors) {
      Sums sums;
      const std::int64_t end = vectors < kVectors ? panel + 1 : panel + kPanels;
      multiply(some, matrix, panel, end * kPanel, sums);
      each<kVectors>([&](int v) {
        if (v < vectors)
          each<kTogetherRows>([&](int i) {
            form[i] += sums[i][v] * load_as<V>(some.row[i] + panel * kPanel + v * W);
          });
      });
    });
    for (std::int64_t i = 0; i < left; i++) forms[first + i] = total_of(form[i]);
  }
}

inline V products(const float* a, const float* b, std::int64_t panels) {
  V sum[kPanelVectors] = {};
  for (std::int64_t at = 0; at < panels * kPanel; at += kPanel)
    each<kPanelVectors>(
        [&](int v) { sum[v] += load_as<V>(a + at + v * W) * load_as<V>(b + at + v * W); });
  for (int v = 1; v < kPanelVectors; v++) sum[0] += sum[v];
  return sum[0];
}

inline float dot(const float* a, const float* b, std::int64_t panels) {
  return total_of(products(a, b, panels));
}

// Dot products of up to W rows, one behind the other, with the same vector.
inline V dots(const float* rows, std::int64_t count, const float* with, std::int64_t panels) {
  V sums[W];
  for (std::int64_t i = 0; i < W; i++)
    sums[i] = i < count ? products(rows + i * panels * kPanel, with, panels) : V{};
  transpose(sums);
  for (int i = 1; i < W; i++) sums[0] += sums[i];
  return sums[0];
}

}  // namespace
}  // namespace calipers
