// What the kernels are told: plain numbers and pointers, the same for every instruction set.
//
// Work is cut into tasks that do not know of each other. How it is cut depends on the sizes only,
// never on the number of threads, so that results do not either.
#pragma once

#include <cstddef>
#include <cstdint>

namespace calipers {

// Functions in this file become part of every kernel, never one that kernels for different machines
// could share.
#define CALIPERS_INLINE [[gnu::always_inline]]

constexpr std::size_t kTile = 4096;             // floats that are worked on at a time
constexpr std::size_t kTileBytes = kTile * sizeof(float);
constexpr std::int64_t kLanes = 16;             // floats in the widest vector of any instruction set
constexpr std::size_t kVectorBytes = kLanes * sizeof(float);

enum class DType : std::int32_t { f32, f16, bf16 };

CALIPERS_INLINE constexpr std::int64_t element_size(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

// A tensor cut into a grid of pieces that share a scale; strides are in elements. A piece is made
// of `observations` × `rows` × `columns` values, counted in that order by their position.
struct Pieces {
  const std::byte* data;
  DType dtype;
  std::int64_t observations, grid_rows, grid_columns, rows, columns;
  std::int64_t observation_stride, grid_row_stride, grid_column_stride, row_stride, column_stride;

  CALIPERS_INLINE std::int64_t count() const { return grid_rows * grid_columns; }
  CALIPERS_INLINE std::int64_t length() const { return observations * rows * columns; }
  CALIPERS_INLINE std::int64_t offset(std::int64_t piece) const {
    return piece / grid_columns * grid_row_stride + piece % grid_columns * grid_column_stride;
  }
  // How many positions from `position` on lie in one row, and where that begins.
  CALIPERS_INLINE std::int64_t run(std::int64_t position) const {
    return columns - position % columns;
  }
  CALIPERS_INLINE std::int64_t offset_within(std::int64_t position) const {
    const std::int64_t row = position / columns;
    return row / rows * observation_stride + row % rows * row_stride +
           position % columns * column_stride;
  }
  // Whether as many pieces as a vector has lanes fit into one tile.
  CALIPERS_INLINE bool is_short() const { return length() * kLanes <= (std::int64_t)kTile; }
  // Whether piece after piece fills one stretch of memory.
  CALIPERS_INLINE bool packed() const {
    const bool whole = (columns == 1 || column_stride == 1) && (rows == 1 || row_stride == columns) &&
                       (observations == 1 || observation_stride == rows * columns);
    return whole && (grid_columns == 1 || grid_column_stride == length()) &&
           (grid_rows == 1 || grid_row_stride == grid_columns * length());
  }
};

// Pieces come in runs, long pieces are cut into chunks of positions; a task is one of both.
struct Cut {
  std::int64_t pieces_per_run, positions_per_chunk, runs, chunks;
  CALIPERS_INLINE std::int64_t tasks() const { return runs * chunks; }
};

struct ExtremaJob {
  Pieces values;
  bool interleaved;             // the pieces of a run lie side by side in memory, row by row
  Cut cut;
  std::byte *low, *high;        // [chunks][pieces], dtype of the values
  std::uint8_t* any_finite;     // [chunks][pieces] or null
  std::int64_t* nonfinite;      // [tasks]
};

// |x|^norm for |x| < 2⁸: m^exponent of the mantissa m by a polynomial, 2^(e·exponent) of the exponent e
// from a table of all of them, or from two of eight; and squares for what is left of a large norm.
struct Power {
  static constexpr int degree = 6;
  float coefficients[degree + 1];  // from the highest
  float octaves[32];               // by the last five bits of the biased exponent
  float fine[8], coarse[8];        // by the last three bits, and by the three above them
  int squares;
};

// The number formats, a row each: what grid.h is to make of it, and whether codes can be shifted by a
// zero point. A job has the number of a row; where its numbers end, it is told.
enum class Rounding : std::int32_t { to_integers, to_floats };

struct GridRow {
  const char* name;
  Rounding rounding;
  int mantissa, smallest_exponent;  // bits, and the power of two of the smallest normal float
  bool has_zero_points;
};

constexpr GridRow kGrids[] = {
    {"int", Rounding::to_integers, 0, 0, true},
    {"e4m3", Rounding::to_floats, 3, -6, true},
    {"e3m2", Rounding::to_floats, 2, -2, false},
    {"e2m3", Rounding::to_floats, 3, 0, false},
    {"e2m1", Rounding::to_floats, 1, 0, false},
};
constexpr std::size_t kGridCount = sizeof kGrids / sizeof *kGrids;

// Where scales come from: ranges make them, as a float of the dtype or as a power of two; or they
// are given.
enum class ScaleSource : std::int32_t { plain, power_of_two, given };

struct SearchJob {
  Pieces values;
  Pieces weights;               // data is null where all values count alike
  Cut cut;
  const float *low, *high;      // [pieces]
  const float* factors;         // [candidates]
  std::int64_t candidates;
  std::int64_t patience;        // candidates in a row that improve nothing and end it; 0: endless
  ScaleSource scale;
  bool shifted;                 // whether codes are shifted by a zero point
  const float *scales, *zero_points;  // [candidates][pieces], if they are given
  std::size_t grid;             // its row
  float lowest, highest;        // the ends of the grid
  float norm;
  Power power;                  // for norms other than 2 and 3
  // What is known of each piece: the best of the first `done` candidates and its error. The latter
  // two are null without patience, since then all candidates are tried at once.
  std::int32_t *best, *done;    // [pieces]
  double* least;                // [pieces]
  std::uint8_t* improved;       // [candidates]: whether one was the best so far of any piece
  // If pieces are cut, only the errors of the candidates [begin, end) are worked out.
  double* errors;               // [chunks][pieces][end - begin], else null
  std::int64_t begin, end;
};

CALIPERS_INLINE inline void mark_improved(const SearchJob& job, std::int64_t candidate) {
  if (!__atomic_load_n(job.improved + candidate, __ATOMIC_RELAXED))
    __atomic_store_n(job.improved + candidate, 1, __ATOMIC_RELAXED);
}
CALIPERS_INLINE inline std::int64_t done_of(const SearchJob& job, std::int64_t piece) {
  return job.done ? job.done[piece] : 0;
}
CALIPERS_INLINE inline double least_of(const SearchJob& job, std::int64_t piece) {
  return done_of(job, piece) ? job.least[piece] : 1e300;
}
CALIPERS_INLINE inline void remember(const SearchJob& job, std::int64_t piece, std::int64_t done,
                                     double least) {
  if (!job.done) return;
  job.done[piece] = static_cast<std::int32_t>(done);
  job.least[piece] = least;
}

// Take in the errors of the candidates [begin, end), `sums` from `begin` on.
CALIPERS_INLINE inline void choose(const SearchJob& job, std::int64_t piece, const double* sums,
                                   std::int64_t begin, std::int64_t end) {
  double least = least_of(job, piece);
  for (std::int64_t c = begin; c < end; c++) {
    if (!(sums[c - begin] < least)) continue;
    least = sums[c - begin];
    job.best[piece] = static_cast<std::int32_t>(c);
    mark_improved(job, c);
  }
  remember(job, piece, end, least);
}

// How many candidates are tried before too many in a row improve nothing, as far as is known. What
// is learnt of further pieces can only make it more.
CALIPERS_INLINE inline std::int64_t reach(const SearchJob& job) {
  if (!job.patience) return job.candidates;
  std::int64_t stalled = 0;
  for (std::int64_t c = 0; c < job.candidates; c++) {
    stalled = __atomic_load_n(job.improved + c, __ATOMIC_RELAXED) ? 0 : stalled + 1;
    if (stalled == job.patience) return c + 1;
  }
  return job.candidates;
}

// The codes that there are, and the zero point they are shifted by. `above` and `below`: times the
// largest value, and times the negative of the smallest, the scale from which on half of it is no
// worse.
struct Window {
  float zero, lowest, highest, above, below;
};

struct OptimumJob {
  Pieces values;
  Pieces weights;               // data is null where all values count alike
  Cut cut;                      // pieces are never cut
  const float *low, *high;      // [pieces]
  const float* storable;        // [scales], ascending, and a vector more
  std::int64_t scales;
  float halvable;               // from which scale on half of it can be stored too
  float most;                   // beyond which no value is to get
  const Window* windows;
  std::int64_t window_count;
  bool windows_have_floor;      // they are parts of one endless grid
  bool in_lanes;                // pieces are short and scales are few
  bool shifted;                 // whether windows have zero points
  std::size_t grid;
  float norm;
  Power power;
  std::int64_t kept;
  float* best;                  // [pieces][kept], the best first
  std::int32_t* window;         // [pieces][kept]
  double* errors;               // [pieces][kept]
};

constexpr std::int64_t kMostKeptLanes = 8;  // candidates of a piece, where pieces lie in the lanes

constexpr std::int64_t kMostTails = 1 << 14;  // values of a 16-bit dtype that are told apart

struct RangesJob {
  Cut cut;
  DType dtype;
  std::int64_t pieces;
  const float *low, *high;      // [pieces]
  const float* factors;
  const std::int32_t* best;     // [pieces]
  std::byte *start, *end;       // [pieces], of the dtype
};

struct MomentsJob {
  Pieces values;                // one piece; rows are tokens, columns are channels
  const std::uint8_t* mask;     // [tokens] or null
  Cut cut;                      // pieces_per_run counts channels, positions_per_chunk tokens
  double* sums;                 // [chunks][channels]
};

struct CountsJob {
  Pieces values;
  Cut cut;
  std::int64_t* counts;         // [pieces][65536], shared by the chunks of a piece
};

struct ChannelsJob {
  Pieces values;                // one piece; rows are tokens, columns are channels
  const std::uint8_t* mask;     // [tokens] or null
  Cut cut;                      // that of MomentsJob
  double* sums;                 // [chunks][channels]
  std::byte *low, *high;        // [chunks][channels], dtype of the values; Inf and −Inf without tokens
  std::uint8_t* finite;         // [tasks]: whether all values are
  std::int64_t* const* tables;  // [table_count][65536]: what they add up to are the counts
  std::uint8_t* in_use;         // [table_count]: whether a task counts into a table
  std::int64_t table_count;     // as many as threads; none if nobody asks for counts
};

struct QuantizeJob {
  Pieces values, weights;       // weights.data is null if all errors count alike
  Cut cut;
  const float *scales, *zero_points;  // [pieces]; zero_points may be null
  DType working;                // what quotients are rounded to before they are rounded to the grid
  std::size_t grid;
  float lowest, highest;
  float norm;
  Power power;
  std::byte* output;            // packed, dtype of the values; null if nobody asks for them
  double* errors;               // [chunks][pieces]
};

// What the values of a matrix are divided by, and the numbers they are rounded to.
struct Scaling {
  const float *scales, *zeros;  // [rows][groups]; zeros may be null
  std::int64_t pitch;           // from row to row; 0: all rows have the same
  const std::int64_t* groups;   // [columns]
  std::size_t grid;
  float lowest, highest;
};

// One block of columns. Pointers are to its first one.
struct FeedbackJob {
  Cut cut;                      // pieces_per_run counts rows
  std::int64_t rows, columns;
  std::int64_t pitch;           // from row to row of all but `adjusted`
  Scaling scaling;
  float* adjusted;              // [rows][columns]: the target and what comes from the blocks before
  const float* target;
  const float* factor;
  float *result, *errors;
};

struct DescentJob {
  Cut cut;                      // pieces_per_run counts rows
  std::int64_t rows, columns, block, sweeps;
  float least_gain;             // of what a step costs by itself
  Scaling scaling;
  const float* hessian;         // [columns][columns]
  float *values, *pulls;        // [rows][columns]
  std::int64_t* changed;        // [tasks]
};

constexpr std::int64_t kPanel = 16;      // columns of a matrix that lie together
constexpr std::int64_t kJointRows = 32;  // at most, of a task

// Blocks of a Hessian, each along `places` pieces of one row. `length`: columns of a piece, filled up.
struct JointJob {
  Pieces values;                // of one row each
  Cut cut;                      // pieces_per_run counts rows of the grid, a chunk is a block
  std::int64_t candidates, places, panels, rounds;
  const float *scales, *zeros;  // [pieces][candidates]; zeros may be null
  const float* own;             // [blocks][places][panels][length][kPanel]: H twice above its diagonal
  const float* across;          // [blocks][places][panels][places][columns][kPanel]
  std::size_t grid;
  float lowest, highest;
  std::int64_t* chosen;         // [pieces]
  CALIPERS_INLINE std::int64_t length() const { return panels * kPanel; }
};

struct PackJob {
  Pieces values;                // one matrix
  Cut cut;                      // pieces_per_run counts rows
  std::int64_t rows_together;   // worked on before the next ones
  const float *scales, *zeros;  // of blocks of `height` rows and `width` columns
  std::int64_t height, width, scale_columns;
  std::int64_t zero_step;       // from block to block; 0: all have the same
  DType working;                // what every step is rounded to
  std::size_t grid;
  float lowest, highest;
  float offset;                 // added to whole numbers, which makes them codes
  int bits;                     // of a code
  std::int64_t row_bytes;
  std::uint8_t* packed;         // [rows][row_bytes], or null
  float* output;                // [rows][columns]: the numbers that codes stand for; or null
  double* errors;               // [tasks][columns]
  std::uint8_t* nans;           // [tasks]: whether there was one
};

// Values are coded so many at a time, that memory is asked for the next ones all the while.
constexpr std::int64_t kPackTile = 1024;

// A piece that is swept: values and weights in the unit of the sweep, [length], with zeros up to a whole
// vector; values without their sign, and the last number on their side.
struct SweepPiece {
  float *values, *weights, *magnitudes, *ends;
  std::int64_t length;
  // Numbers are whole where `smallest` is zero. Else they are floats, `smallest` is the first normal one,
  // and a code is rounded by adding `large` times its power of two.
  float smallest, large;
};

// Σ w·|x|·g and Σ w·g².
struct SweepSums {
  double linear, quadratic;
};

// A power of two, as a product: it need not be a float.
struct SweepUnit {
  float first, second;
};

// A value whose number changes between two scales.
struct Changed {
  std::int32_t index;
  float number, next;
};

struct SweepKernels {
  float (*load)(const Pieces&, std::int64_t piece, float* to);  // returns the largest
  // Bring values and weights into their units. Returns Σ |x| and Σ w·x².
  SweepSums (*measure)(const SweepPiece&, SweepUnit of_values, SweepUnit of_weights);
  // Of the ends.
  SweepSums (*set_ends)(const SweepPiece&, float below, float above);
  void (*errors)(const SweepPiece&, const float* scales, std::int64_t count, double* errors);
  // Of the first scale; the two may be told apart wrongly from a change within 3·10⁻⁷ of either.
  SweepSums (*changed)(const SweepPiece&, float high, float low, Changed* changed, std::int64_t* count);
};

// What runs one task of a job, in scratch memory of its own.
template <class Job> struct Kernel {
  std::size_t (*scratch_bytes)(const Job&);
  // Returns whether the task stayed within its scratch memory.
  bool (*run)(const Job&, std::int64_t task, std::byte* scratch);
};

// One set of kernels per instruction set.
struct Kernels {
  const char* name;
  Kernel<ExtremaJob> extrema;
  Kernel<SearchJob> search;
  Kernel<OptimumJob> optimum;
  Kernel<RangesJob> ranges;
  Kernel<MomentsJob> moments;
  Kernel<CountsJob> counts;
  Kernel<ChannelsJob> channels;
  Kernel<QuantizeJob> quantize;
  Kernel<FeedbackJob> feedback;
  Kernel<DescentJob> descent;
  Kernel<JointJob> joint;
  Kernel<PackJob> pack;
  SweepKernels sweep;
};

}  // namespace calipers
