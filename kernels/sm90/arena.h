// Arrays side by side in one piece of memory. A layout is one function over an Arena: with a base it hands out the
// addresses, and without one (base null, nothing is dereferenced) it only counts the bytes, so that the size that a
// caller must provide and the addresses that kernels use cannot disagree.
#pragma once

#include <cstdint>

namespace sparsellm {

class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}

  // Room for `count` elements of T, at a multiple of kAlignment bytes from the base.
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
