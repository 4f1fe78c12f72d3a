// What the bindings share: tensors as they come from Python and the checks of them, how work is cut into
// tasks, and how these run.
//
// Everything that a kernel reads or writes is checked here, in every build: a wrong size or stride is an
// exception of Python, never memory that belongs to something else.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../jobs.h"
#include "../parallel.h"

namespace calipers {

namespace nb = nanobind;
using namespace nb::literals;

// Tensors come by DLPack, which knows sizes and strides, and vouches for them.
using Tensor = nb::ndarray<nb::ro, nb::device::cpu>;
using AnyArray = nb::ndarray<nb::c_contig, nb::device::cpu>;
template <class T> using Array = nb::ndarray<T, nb::c_contig, nb::device::cpu>;
template <class T> using Optional = std::optional<Array<T>>;

constexpr std::int64_t kTaskValues = 1 << 16;

// The kernels of the instruction set that is in use.
const Kernels& chosen();

// What comes in

DType dtype_of(const nb::dlpack::dtype& dtype);
DType dtype_named(const std::string& name);

// Five dimensions: (observations, grid rows, grid columns, rows, columns).
Pieces pieces_of(const Tensor& tensor);
// The same of weights, in the shape of values; without data where there are none.
Pieces weights_of(const std::optional<Tensor>& weights, const Tensor& values);

void expect(std::size_t found, std::int64_t wanted, const char* what);

template <class T> T* data_or_null(const Optional<T>& array, std::int64_t wanted, const char* what) {
  if (!array) return nullptr;
  expect(array->size(), wanted, what);
  return array->data();
}

// The numbers that codes stand for.
struct Numbers {
  std::size_t grid;
  float lowest, highest;
  Numbers(const std::string& name, float lowest, float highest);
};
std::size_t grid_of(const std::string& name, bool shifted = false);

template <class Job> void set_numbers(Job& job, const Numbers& numbers) {
  job.grid = numbers.grid;
  job.lowest = numbers.lowest;
  job.highest = numbers.highest;
}

// How work is cut

inline std::int64_t divide_up(std::int64_t count, std::int64_t unit) { return (count + unit - 1) / unit; }

Cut cut_of(const Pieces& pieces, std::int64_t per_task = kTaskValues);
// Into runs of whole pieces.
Cut cut_of_whole(const Pieces& pieces, std::int64_t per_task);

// How tasks run

bool signals_pending();
// `work` is about how many values are looked at; a thread is only started for enough of them.
int useful_threads(int threads, std::int64_t work);

// Run tasks without the GIL, until they are done or Ctrl-C is heard, which is raised.
template <class Task>
void run_released(std::int64_t tasks, int threads, std::int64_t work, std::size_t scratch, Task&& task) {
  bool finished;
  {
    nb::gil_scoped_release released;
    finished = run_tasks(tasks, useful_threads(threads, work), scratch, task, signals_pending);
  }
  if (!finished) throw nb::python_error();
}

template <class Job> void run(const Kernel<Job>& kernel, const Job& job, int threads, std::int64_t work) {
  std::atomic<bool> intact{true};
  run_released(job.cut.tasks(), threads, work, kernel.scratch_bytes(job),
               [&](std::int64_t task, std::byte* memory) {
                 if (!kernel.run(job, task, memory)) intact = false;
               });
  if (!intact) throw std::runtime_error("A kernel has left its scratch memory: a bug of Calipers.");
}

// The bindings, a file each

void bind_extrema(nb::module_& m);
void bind_search(nb::module_& m);
void bind_optimum(nb::module_& m);
void bind_moments(nb::module_& m);
void bind_counts(nb::module_& m);
void bind_products(nb::module_& m);
void bind_quantize(nb::module_& m);
void bind_feedback(nb::module_& m);
void bind_joint(nb::module_& m);
void bind_packing(nb::module_& m);

}  // namespace calipers
