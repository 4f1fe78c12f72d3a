#include "gram.h"

#include <cstring>

#if defined(__AVX512BF16__)
#include <immintrin.h>

namespace calipers {
namespace {

constexpr int kRows = 8;     // of a tile: 8 × 3 sums stay in registers
constexpr int kVectors = 3;  // kGramPanel / 16
constexpr std::int64_t kPairs = 128;  // of tokens, summed in float32

// sums[row][column] += Σ left · right over some pairs of tokens. One instruction multiplies two tokens
// exactly, and adds them one after the other in float32; numbers below 2^-126 count as zero.
void add_tile(const std::uint32_t* left, const std::uint32_t* right, std::int64_t pairs, double* sums) {
  __m512 sum[kRows][kVectors];
  for (int i = 0; i < kRows; i++)
    for (int v = 0; v < kVectors; v++) sum[i][v] = _mm512_setzero_ps();
  for (std::int64_t pair = 0; pair < pairs; pair++) {
    __m512bh columns[kVectors];
    for (int v = 0; v < kVectors; v++)
      columns[v] = (__m512bh)_mm512_loadu_si512(right + pair * kGramPanel + v * 16);
    for (int i = 0; i < kRows; i++) {
      const __m512bh row = (__m512bh)_mm512_set1_epi32((int)left[pair * kGramPanel + i]);
      for (int v = 0; v < kVectors; v++) sum[i][v] = _mm512_dpbf16_ps(sum[i][v], row, columns[v]);
    }
  }
  for (int i = 0; i < kRows; i++)
    for (int v = 0; v < kVectors; v++) {
      double* to = sums + i * kGramPanel + v * 16;
      const __m256 low = _mm512_castps512_ps256(sum[i][v]);
      const __m256 high = _mm512_extractf32x8_ps(sum[i][v], 1);
      _mm512_storeu_pd(to, _mm512_add_pd(_mm512_loadu_pd(to), _mm512_cvtps_pd(low)));
      _mm512_storeu_pd(to + 8, _mm512_add_pd(_mm512_loadu_pd(to + 8), _mm512_cvtps_pd(high)));
    }
}

}  // namespace

bool has_gram() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512dq");
}

void pack_gram_panel(const GramSide& side, std::int64_t tokens, std::int64_t panel, std::uint32_t* to) {
  const std::int64_t first = panel * kGramPanel;
  const std::int64_t left = side.columns - first;
  const std::int64_t columns = left < kGramPanel ? left : kGramPanel;
  for (std::int64_t token = 0; token < tokens; token += 2, to += kGramPanel) {
    const std::uint16_t* even = side.data + token * side.stride + first;
    const std::uint16_t* odd = token + 1 < tokens ? even + side.stride : nullptr;
    for (std::int64_t c = 0; c < columns; c++)
      to[c] = even[c] | (odd ? (std::uint32_t)odd[c] << 16 : 0);
    for (std::int64_t c = columns; c < kGramPanel; c++) to[c] = 0;
  }
}

void add_gram_block(const GramJob& job, std::int64_t left, std::int64_t right) {
  alignas(64) double sums[kGramPanel * kGramPanel] = {};
  const std::uint32_t* rows = job.left_packed + left * job.panel_words();
  const std::uint32_t* columns = job.right_packed + right * job.panel_words();
  for (std::int64_t pair = 0; pair < job.pairs(); pair += kPairs) {
    const std::int64_t rest = job.pairs() - pair;
    for (std::int64_t i = 0; i < kGramPanel; i += kRows)
      add_tile(rows + pair * kGramPanel + i, columns + pair * kGramPanel,
               rest < kPairs ? rest : kPairs, sums + i * kGramPanel);
  }
  const std::int64_t first_row = left * kGramPanel, first_column = right * kGramPanel;
  for (std::int64_t i = 0; i < kGramPanel && first_row + i < job.left.columns; i++) {
    double* to = job.total + (first_row + i) * job.right.columns + first_column;
    for (std::int64_t j = 0; j < kGramPanel && first_column + j < job.right.columns; j++)
      to[j] += sums[i * kGramPanel + j];
  }
  if (!job.symmetric || left == right) return;
  for (std::int64_t j = 0; j < kGramPanel && first_column + j < job.right.columns; j++) {
    double* to = job.total + (first_column + j) * job.right.columns + first_row;
    for (std::int64_t i = 0; i < kGramPanel && first_row + i < job.left.columns; i++)
      to[i] += sums[i * kGramPanel + j];
  }
}

}  // namespace calipers

#else

namespace calipers {

bool has_gram() { return false; }
void pack_gram_panel(const GramSide&, std::int64_t, std::int64_t, std::uint32_t*) {}
void add_gram_block(const GramJob&, std::int64_t, std::int64_t) {}

}  // namespace calipers

#endif
