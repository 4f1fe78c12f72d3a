// Σ x yᵀ over tokens in bfloat16, for machines with its dot-product instruction (AVX512_BF16).
#pragma once

#include <cstddef>
#include <cstdint>

namespace calipers {

constexpr std::int64_t kGramPanel = 48;     // columns that are packed together: three vectors
constexpr std::int64_t kGramTokens = 1024;  // at most, packed at a time

// A matrix of tokens, (tokens, columns); columns lie side by side, `stride` is from token to token.
struct GramSide {
  const std::uint16_t* data;
  std::int64_t columns, stride;
  std::int64_t panels() const { return (columns + kGramPanel - 1) / kGramPanel; }
};

struct GramJob {
  GramSide left, right;
  std::int64_t tokens;
  bool symmetric;                  // both sides are the same: pairs of panels are computed once
  std::uint32_t *left_packed, *right_packed;  // [panel][pair of tokens][kGramPanel], pairs in one word
  double* total;                   // [left.columns][right.columns]
  std::int64_t pairs() const { return (tokens + 1) / 2; }
  std::int64_t panel_words() const { return pairs() * kGramPanel; }
};

// Whether this build has them, and this machine can run them.
bool has_gram();

// Pack one panel of a side; an odd last token is paired with zeros, and so are missing columns.
void pack_gram_panel(const GramSide& side, std::int64_t tokens, std::int64_t panel, std::uint32_t* to);

// total += Σ x yᵀ of two panels, of all tokens of the job (at most kGramTokens).
void add_gram_block(const GramJob& job, std::int64_t left, std::int64_t right);

}  // namespace calipers
