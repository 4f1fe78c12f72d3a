// Vectors of as many floats as the instruction set has lanes, by the vector extension of GCC and
// Clang. This file is compiled once per instruction set; nothing in it has external linkage.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "jobs.h"

namespace calipers {
namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float V __attribute__((vector_size(4 * W)));
typedef std::int32_t I __attribute__((vector_size(4 * W)));
typedef std::uint32_t U32 __attribute__((vector_size(4 * W)));
typedef std::int16_t Short __attribute__((vector_size(4 * W)));  // twice the lanes
typedef std::uint16_t UShort __attribute__((vector_size(4 * W)));
typedef std::uint16_t U16 __attribute__((vector_size(2 * W)));
typedef std::uint8_t U8 __attribute__((vector_size(W)));
typedef float Half __attribute__((vector_size(2 * W)));
typedef double D __attribute__((vector_size(4 * W)));  // as wide in bytes as V: half the lanes

template <class T> T load_as(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
// Ask for memory that will be read soon; it need not exist.
inline void prefetch(const void* from, std::size_t ahead) {
  __builtin_prefetch((const void*)((std::uintptr_t)from + ahead));
}
template <class T> void store(void* to, T value) { std::memcpy(to, &value, sizeof value); }

inline V all(float x) { return x - V{}; }  // V{} + x would not be x for −0, and hence an addition
inline I all_bits(std::int32_t x) { return I{} + x; }
// GCC does not always see that a comparison and a choice are one instruction.
inline V minimum(V a, V b) {
#if defined(__AVX512F__)
  return (V)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (V)_mm256_min_ps((__m256)a, (__m256)b);
#elif defined(__aarch64__)
  return (V)vminq_f32((float32x4_t)a, (float32x4_t)b);
#else
  return a < b ? a : b;
#endif
}
inline V maximum(V a, V b) {
#if defined(__AVX512F__)
  return (V)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (V)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__aarch64__)
  return (V)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
#else
  return a > b ? a : b;
#endif
}
inline V absolute(V a) { return (V)((I)a & 0x7fffffff); }

inline V larger_magnitude(V a, V b) {
#if defined(__AVX512DQ__)
  return (V)_mm512_range_ps((__m512)a, (__m512)b, 0b1011);  // 11: of absolute values, 10: without sign
#else
  return maximum(absolute(a), absolute(b));
#endif
}

// 1 / x to within a unit in the last place, for x that is neither tiny nor huge.
inline V reciprocal(V x) {
#if defined(__AVX512F__)
  const V guess = (V)_mm512_rcp14_ps((__m512)x);
  return guess + guess * (1 - x * guess);
#else
  return 1 / x;
#endif
}

constexpr std::int32_t kExponent = 0x7f800000;

// Lanes that are NaN or Inf, told by their bits: the compiler may assume that there are none.
inline I nonfinite_lanes(V x) { return ((I)x & kExponent) == kExponent; }
inline V finite_or_zero(V x) { return nonfinite_lanes(x) ? V{} : x; }

inline bool any(I mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#elif defined(__aarch64__)
  return vmaxvq_u32((uint32x4_t)mask) != 0;
#else
  std::int32_t found = 0;
  for (int i = 0; i < W; i++) found |= mask[i];
  return found != 0;
#endif
}

// One bit per lane that is set.
inline std::uint32_t lane_bits(I mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#elif defined(__AVX2__)
  return (std::uint32_t)_mm256_movemask_ps((__m256)mask);
#elif defined(__aarch64__)
  return vaddvq_u32((uint32x4_t)(mask & I{1, 2, 4, 8}));
#else
  std::uint32_t bits = 0;
  for (int i = 0; i < W; i++) bits |= (mask[i] & 1u) << i;
  return bits;
#endif
}

// The first or the second half of a and b, interleaved.
template <int... i> V zip(V a, V b, int half, std::integer_sequence<int, i...>) {
#if defined(__clang__)
  return half ? __builtin_shufflevector(a, b, (W / 2 + i / 2 + (i % 2) * W)...)
              : __builtin_shufflevector(a, b, (i / 2 + (i % 2) * W)...);
#else
  return half ? __builtin_shuffle(a, b, I{(W / 2 + i / 2 + (i % 2) * W)...})
              : __builtin_shuffle(a, b, I{(i / 2 + (i % 2) * W)...});
#endif
}
inline V zip_first(V a, V b) { return zip(a, b, 0, std::make_integer_sequence<int, W>{}); }
inline V zip_second(V a, V b) { return zip(a, b, 1, std::make_integer_sequence<int, W>{}); }

inline void transpose(V (&rows)[W]) {
  for (int stage = 1; stage < W; stage *= 2) {
    V next[W];
    for (int i = 0; i < W / 2; i++) {
      next[2 * i] = zip_first(rows[i], rows[i + W / 2]);
      next[2 * i + 1] = zip_second(rows[i], rows[i + W / 2]);
    }
    for (int i = 0; i < W; i++) rows[i] = next[i];
  }
}

// Of a and b, every second unit of so many lanes within each span: the even or the odd ones of a, then
// those of b. Within 16 bytes that is one instruction on every machine.
constexpr int unit_lane(int i, int unit, int span, int odd) {
  const int number = i % span / unit, half = span / unit / 2;
  return (number < half ? 0 : W) + i / span * span + (2 * (number % half) + odd) * unit + i % unit;
}
template <int unit, int span, int odd, int... i> I units(I a, I b, std::integer_sequence<int, i...>) {
#if defined(__clang__)
  return (I)__builtin_shufflevector((V)a, (V)b, unit_lane(i, unit, span, odd)...);
#else
  return (I)__builtin_shuffle((V)a, (V)b, I{unit_lane(i, unit, span, odd)...});  // of floats: one instruction
#endif
}
template <I fold(I, I), int unit, int span> void fold_units(I (&rows)[W], int left) {
  constexpr auto lanes = std::make_integer_sequence<int, W>{};
  for (int i = 0; i < left; i++)
    rows[i] = fold(units<unit, span, 0>(rows[2 * i], rows[2 * i + 1], lanes),
                   units<unit, span, 1>(rows[2 * i], rows[2 * i + 1], lanes));
}

// Within eight lanes, the first four and the last four interleaved.
template <int... i> I interleaved(I a, std::integer_sequence<int, i...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, a, (i / 8 * 8 + i % 8 / 2 + i % 2 * 4)...);
#else
  return __builtin_shuffle(a, I{(i / 8 * 8 + i % 8 / 2 + i % 2 * 4)...});
#endif
}

// Fold all lanes of each row into one, or each half of them (`halves`), in place and in order.
template <I fold(I, I), bool halves> void fold_lanes(I (&rows)[W]) {
  fold_units<fold, 1, 4>(rows, W / 2);
  if constexpr (!halves || W > 4) fold_units<fold, 1, 4>(rows, W / 4);
  if constexpr (W >= (halves ? 16 : 8)) fold_units<fold, 4, W>(rows, W / 8);
  if constexpr (W >= 16 && !halves) fold_units<fold, 4, W>(rows, W / 16);
  if constexpr (halves && W > 4)
    for (int i = 0; i < 2; i++) rows[i] = interleaved(rows[i], std::make_integer_sequence<int, W>{});
}

// The lower and the upper half of the lanes as doubles.
inline D lower_doubles(V x) {
#if defined(__AVX512F__)
  return (D)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x));
#elif defined(__AVX2__)
  return (D)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)x));
#elif defined(__aarch64__)
  return (D)vcvt_f64_f32(vget_low_f32((float32x4_t)x));
#else
  return __builtin_convertvector(load_as<Half>(&x), D);
#endif
}
inline D upper_doubles(V x) {
#if defined(__AVX512F__)
  return (D)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)x, 1));
#elif defined(__AVX2__)
  return (D)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)x, 1));
#elif defined(__aarch64__)
  return (D)vcvt_high_f64_f32((float32x4_t)x);
#else
  return __builtin_convertvector(load_as<Half>((const std::byte*)&x + sizeof(Half)), D);
#endif
}

inline double sum(D x) {
  double total = 0;
  for (int i = 0; i < W / 2; i++) total += x[i];
  return total;
}
inline double sum(V x) { return sum(lower_doubles(x) + upper_doubles(x)); }

// Entries of a table in memory.
inline V gather(const float* table, I index) {
#if defined(__AVX512F__)
  return (V)_mm512_i32gather_ps((__m512i)index, table, 4);
#elif defined(__AVX2__)
  return (V)_mm256_i32gather_ps(table, (__m256i)index, 4);
#else
  V found;
  for (int i = 0; i < W; i++) found[i] = table[index[i]];
  return found;
#endif
}

// Tables of floats in registers, looked up by the last bits of each lane: five of them, or three.
#if defined(__AVX512F__)
struct Table32 {
  V part[2];
  explicit Table32(const float* values) { std::memcpy(part, values, sizeof part); }
  V operator[](I index) const {
    return (V)_mm512_permutex2var_ps((__m512)part[0], (__m512i)index, (__m512)part[1]);
  }
};
#else
struct Table8 {
  float values[8];
  explicit Table8(const float* from) { std::memcpy(values, from, sizeof values); }
  V operator[](I index) const {
#if defined(__AVX2__)
    return (V)_mm256_permutevar8x32_ps(load_as<__m256>(values), (__m256i)index);
#elif defined(__aarch64__)
    // Four bytes of each lane, from 32 of them.
    const I bytes = (index & 7) * 0x04040404 + 0x03020100;
    return (V)vqtbl2q_u8(load_as<uint8x16x2_t>(values), (uint8x16_t)bytes);
#else
    V found;
    for (int i = 0; i < W; i++) found[i] = values[index[i] & 7];
    return found;
#endif
  }
};
#endif

// Between 16 and 32 bits; what GCC makes of __builtin_convertvector is slow.

inline U32 widen(U16 x) {
#if defined(__AVX512F__)
  return (U32)_mm512_cvtepu16_epi32((__m256i)x);
#elif defined(__AVX2__)
  return (U32)_mm256_cvtepu16_epi32((__m128i)x);
#elif defined(__aarch64__)
  return (U32)vmovl_u16((uint16x4_t)x);
#else
  return __builtin_convertvector(x, U32);
#endif
}

inline U16 narrow(U32 x) {  // x must fit
#if defined(__AVX512F__)
  return (U16)_mm512_cvtepi32_epi16((__m512i)x);
#elif defined(__AVX2__)
  const __m128i low = _mm256_castsi256_si128((__m256i)x), high = _mm256_extracti128_si256((__m256i)x, 1);
  return (U16)_mm_packus_epi32(low, high);
#elif defined(__aarch64__)
  return (U16)vmovn_u32((uint32x4_t)x);
#else
  return __builtin_convertvector(x, U16);
#endif
}

inline U8 narrow_to_bytes(U32 x) {  // only the last eight bits count
#if defined(__AVX512F__)
  return (U8)_mm512_cvtepi32_epi8((__m512i)x);
#elif defined(__AVX2__)
  const __m128i shorts = (__m128i)narrow(x & 0xff);
  const __m128i bytes = _mm_packus_epi16(shorts, shorts);
  return load_as<U8>(&bytes);
#elif defined(__aarch64__)
  const uint16x4_t shorts = vmovn_u32((uint32x4_t)x);
  const uint8x8_t bytes = vmovn_u16(vcombine_u16(shorts, shorts));
  return load_as<U8>(&bytes);
#else
  return __builtin_convertvector(x, U8);
#endif
}

// 16-bit floats.

inline V from_bf16(U16 bits) { return (V)(widen(bits) << 16); }
inline U16 to_bf16(V x) { return narrow((U32)x >> 16); }  // x must be one

inline V from_f16(U16 bits) {
#if defined(__AVX512F__)
  return (V)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__F16C__)
  return (V)_mm256_cvtph_ps((__m128i)bits);
#elif defined(__aarch64__)
  return (V)vcvt_f32_f16((float16x4_t)bits);
#else
  const U32 wide = widen(bits), magnitude = wide & 0x7fff;
  const V scaled = (V)(magnitude << 13) * 0x1p112f;  // moves the bias of the exponent
  const V special = (V)((magnitude << 13) | kExponent);
  return (V)((U32)(magnitude >= 0x7c00 ? special : scaled) | ((wide & 0x8000) << 16));
#endif
}

inline U16 to_f16(V x) {  // x must be one
#if defined(__AVX512F__)
  return (U16)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
  return (U16)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
  return (U16)vcvt_f16_f32((float32x4_t)x);
#else
  const U32 finite = (U32)minimum(absolute(x) * 0x1p-112f, all(0x1p-96f)) >> 13;
  const U32 strange = 0x7c00 | (((U32)x >> 13) & 0x03ff);
  const U32 magnitude = nonfinite_lanes(x) ? strange : finite;
  return narrow(magnitude | (((U32)x >> 16) & 0x8000));
#endif
}

// Round to what the type can hold, ties to even. Beyond its largest value nothing is promised.
inline V round_to_bf16(V x) {
  const U32 bits = (U32)x;
  return (V)((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u);
}

// Round to a float with `mantissa` bits and a smallest exponent, by adding a number so large that
// its last bit has the weight of the last bit wanted.
constexpr float two_to(int exponent) {
  return exponent < 0 ? 1.f / (float)(1ll << -exponent) : (float)(1ll << exponent);
}
template <int mantissa, int smallest_exponent> V round_to_float(V x) {
  const V binade = maximum((V)((I)x & kExponent), all(two_to(smallest_exponent)));
  const V large = binade * (1.5f * (1 << (23 - mantissa)));
  return (x + large) - large;
}

inline V round_to(DType dtype, V x) {
  if (dtype == DType::bf16) return round_to_bf16(x);
  if (dtype == DType::f16) return round_to_float<10, -14>(x);
  return x;
}

}  // namespace
}  // namespace calipers
