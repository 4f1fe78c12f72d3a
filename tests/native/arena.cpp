// What an arena promises: as much memory as it measured is what it hands out, in regions that do not touch,
// and a byte written behind any of them is noticed.
#include <cstdio>
#include <vector>

#include "arena.h"

using namespace calipers;

struct Layout {
  float* floats;
  std::uint8_t* bytes;
  double* doubles;
  std::int16_t* none;
  Layout(Arena& arena, const int& count)
      : floats(arena.take<float>(count)), bytes(arena.take<std::uint8_t>(count + 1)),
        doubles(arena.take<double>(2 * count)), none(arena.take<std::int16_t>(0)) {}
  std::byte* begin(int i) const {
    std::byte* const of[] = {(std::byte*)floats, (std::byte*)bytes, (std::byte*)doubles, (std::byte*)none};
    return of[i];
  }
};

bool failed = false;
void expect(bool holds, const char* what, int count) {
  if (!holds) std::printf("count %d: %s\n", count, what);
  failed |= !holds;
}

int* beyond = nullptr;  // the region behind which a task writes; none if it is null

void task(const int& count, std::int64_t, Layout& scratch) {
  const std::int64_t sizes[] = {count * 4, count + 1, count * 16, 0};
  for (int i = 0; i < 4; i++) {
    std::memset(scratch.begin(i), 1, sizes[i]);
    if (beyond && *beyond == i) scratch.begin(i)[sizes[i]] = std::byte{1};
  }
}

int main() {
  for (int count = 0; count < 70; count++) {
    const Kernel<int> kernel = kernel_of<int, Layout, task>();
    const std::size_t size = kernel.scratch_bytes(count);
    // The end of what was measured lies in front of bytes that must stay as they are.
    std::vector<std::byte> memory(size + 128 + 64, std::byte{7});
    std::byte* start = memory.data() + (64 - (std::uintptr_t)memory.data() % 64) % 64;
    Arena arena(Arena::Mode::carve, start);
    const Layout layout(arena, count);
    expect(arena.size() == size, "what is handed out is not what was measured", count);
    const std::size_t sizes[] = {count * 4u, count + 1u, count * 16u, 0};
    for (int i = 0; i < 4; i++) {
      expect((std::uintptr_t)layout.begin(i) % 64 == 0, "a region is not aligned", count);
      const std::byte* end = i < 3 ? layout.begin(i + 1) : start + size;
      expect(layout.begin(i) + sizes[i] + 64 <= end, "regions touch", count);
    }
    expect(kernel.run(count, 0, start), "a task that stays within its memory is blamed", count);
    for (int i = 0; i < 4; i++) {
      beyond = &i;
      expect(!kernel.run(count, 0, start), "a byte behind a region is not noticed", count);
      beyond = nullptr;
    }
    for (const std::byte* at = start + size; at < memory.data() + memory.size(); at++)
      expect(*at == std::byte{7}, "memory behind what was measured is written to", count);
  }
  std::printf(failed ? "WRONG\n" : "right\n");
  return failed;
}
