// Copies that store past the caches: without reading what they overwrite, and leaving the caches to
// what is read again soon.
#pragma once

#include <cstddef>

namespace pg_sdma {

// Bytes that this thread reads next, after the copy. A core waits for stores past the caches
// anyway: meanwhile what it reads next can come from memory.
class ReadNext {
 public:
  ReadNext() = default;
  ReadNext(const void* data, size_t bytes)
      : at_(static_cast<const char*>(data)), end_(at_ + bytes) {}

  static constexpr size_t kLine = 64;  // bytes of a cache line

  void fetch_line() {
    if (at_ >= end_) return;
    __builtin_prefetch(at_);
    at_ += kLine;
  }

 private:
  const char* at_ = nullptr;
  const char* end_ = nullptr;
};

// Copies `bytes` bytes and fetches as many of `next`, which goes on where it has come to. The bytes
// are visible to other threads before anything that this one stores later. Where the processor is
// not known to have such stores, a plain copy.
void copy_past_caches(void* destination, const void* source, size_t bytes, ReadNext& next);

}  // namespace pg_sdma
