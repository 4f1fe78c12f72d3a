// The native module: which instruction set runs, and the bindings of all operations.
#include "common.h"

namespace calipers {

#if defined(CALIPERS_ARM)
extern const Kernels kernels_neon;
#else
extern const Kernels kernels_generic;
#endif
#if defined(CALIPERS_X86)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

namespace {

std::vector<const Kernels*> usable_kernels() {
#if defined(CALIPERS_ARM)
  return {&kernels_neon};  // every processor of 64 bits has it
#else
  std::vector<const Kernels*> usable{&kernels_generic};
#if defined(CALIPERS_X86)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c"))
    usable.push_back(&kernels_avx2);
  if (usable.size() == 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
    usable.push_back(&kernels_avx512);
#endif
  return usable;
#endif
}

const Kernels* in_use = usable_kernels().back();

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Kernels* kernels : usable_kernels()) names.emplace_back(kernels->name);
  return names;
}

void use(const std::string& name) {
  for (const Kernels* kernels : usable_kernels())
    if (kernels->name == name) {
      in_use = kernels;
      return;
    }
  throw std::invalid_argument("This machine cannot run the instruction set '" + name + "'.");
}

std::vector<std::string> grids() {
  std::vector<std::string> names;
  for (const GridRow& row : kGrids) names.emplace_back(row.name);
  return names;
}

}  // namespace

const Kernels& chosen() { return *in_use; }

}  // namespace calipers

NB_MODULE(_native, m) {
  using namespace calipers;
  m.def("instruction_sets", &instruction_sets);
  m.def("instruction_set", [] { return in_use->name; });
  m.def("use", &use, "name"_a);
  m.def("grids", &grids);
  nb::class_<Numbers>(m, "Numbers").def(nb::init<const std::string&, float, float>(), "grid"_a, "lowest"_a, "highest"_a);
  bind_extrema(m);
  bind_search(m);
  bind_optimum(m);
  bind_moments(m);
  bind_counts(m);
  bind_products(m);
  bind_quantize(m);
  bind_feedback(m);
  bind_joint(m);
  bind_packing(m);
}
