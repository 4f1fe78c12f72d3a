// Σ x yᵀ over tokens in bfloat16.
#include <memory>
#include <utility>

#include "common.h"
#include "../gram.h"

namespace calipers {
namespace {

// A matrix of tokens in bfloat16 whose columns lie side by side.
GramSide gram_side(const Tensor& values) {
  if (values.ndim() != 2 || dtype_of(values.dtype()) != DType::bf16)
    throw nb::value_error("The values must be a matrix in bfloat16.");
  if (values.shape(1) > 1 && values.stride(1) != 1)
    throw nb::value_error("The columns must lie side by side.");
  return {static_cast<const std::uint16_t*>(values.data()),
          static_cast<std::int64_t>(values.shape(1)), values.stride(0)};
}

// Dot products of bfloat16 belong to the widest instruction set.
bool can_add_products() { return has_gram() && std::string(chosen().name) == "avx512"; }

// total += leftᵀ right
void add_products(const Tensor& left, const Tensor& right, Array<double> total, bool symmetric,
                  int threads) {
  if (!can_add_products()) throw nb::value_error("This machine has no dot products of bfloat16.");
  GramJob job{};
  job.left = gram_side(left);
  job.right = gram_side(right);
  const std::int64_t tokens = static_cast<std::int64_t>(left.shape(0));
  expect(right.shape(0), tokens, "right");
  job.symmetric = symmetric;
  job.total = total.data();
  expect(total.size(), job.left.columns * job.right.columns, "total");
  if (symmetric && job.left.columns != job.right.columns)
    throw nb::value_error("A symmetric product has one side.");
  const std::int64_t lefts = job.left.panels(), rights = job.right.panels();
  std::vector<std::pair<std::int64_t, std::int64_t>> blocks;
  for (std::int64_t i = 0; i < lefts; i++)
    for (std::int64_t j = symmetric ? i : 0; j < rights; j++) blocks.emplace_back(i, j);
  // Chunks of about the same size, each of whole pairs.
  const std::int64_t chunks = divide_up(tokens, kGramTokens);
  const std::int64_t each = chunks ? divide_up(divide_up(tokens, chunks), 2) * 2 : 0;
  const std::int64_t words = each / 2 * kGramPanel;
  std::unique_ptr<std::uint32_t[]> memory(
      new std::uint32_t[words * (lefts + (symmetric ? 0 : rights))]);
  job.left_packed = memory.get();
  job.right_packed = symmetric ? memory.get() : memory.get() + words * lefts;
  for (std::int64_t start = 0; start < tokens; start += each) {
    job.tokens = std::min(each, tokens - start);
    GramSide sides[] = {job.left, job.right};
    for (GramSide& side : sides) side.data += start * side.stride;
    run_released(symmetric ? lefts : lefts + rights, threads, job.tokens * job.left.columns, 0,
             [&](std::int64_t panel, std::byte*) {
               const bool is_left = panel < lefts;
               const std::int64_t at = is_left ? panel : panel - lefts;
               pack_gram_panel(sides[!is_left], job.tokens, at,
                               (is_left ? job.left_packed : job.right_packed) + at * job.panel_words());
             });
    // A thread takes neighbouring blocks, the same ones each time: handed out one by one, the lines of
    // `total` would travel from one core's cache to another's, which takes longer than the products.
    const std::int64_t count = static_cast<std::int64_t>(blocks.size());
    run_released(threads, threads, job.tokens * job.left.columns * job.right.columns / 16, 0,
             [&](std::int64_t part, std::byte*) {
               const std::int64_t end = (part + 1) * count / threads;
               for (std::int64_t at = part * count / threads; at < end; at++)
                 add_gram_block(job, blocks[at].first, blocks[at].second);
             });
  }
}

}  // namespace

void bind_products(nb::module_& m) {
  m.def("can_add_products", &can_add_products);
  m.def("add_products", &add_products, nb::kw_only(), "left"_a, "right"_a, "total"_a.noconvert(),
        "symmetric"_a, "threads"_a);
}

}  // namespace calipers
