// Lays out arrays in one block of memory. A layout is one sequence of `take`s over an Arena, and the same sequence runs
// twice: without a base (null), the arena only counts bytes; with a base, the arena also returns addresses. So the size
// that a caller must provide and the addresses that kernels use cannot disagree. An example: after take<float>(10) and
// take<int32_t>(100), the first array is at byte 0, the second at byte 256, and bytes() is 768.
#pragma once

#include <cstdint>

namespace sparsellm {

class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}

  // Reserves memory for `count` elements of T, at a multiple of kAlignment bytes from the base.
  template <typename T>
  T* take(int64_t count) {
    const int64_t at = bytes_;
    bytes_ += (count * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at);
  }
  void* take_bytes(int64_t count) { return take<char>(count); }

  int64_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kAlignment = 256;
  char* base_;
  int64_t bytes_ = 0;
};

}  // namespace sparsellm
