#include "engine/past_caches.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace pg_sdma {

void copy_past_caches(void* destination, const void* source, size_t bytes, ReadNext& next) {
#if defined(__SSE2__)
  constexpr size_t kLine = ReadNext::kLine;
  auto* to = static_cast<char*>(destination);
  const auto* from = static_cast<const char*>(source);
  const size_t head = std::min(bytes, -reinterpret_cast<uintptr_t>(to) % kLine);
  std::memcpy(to, from, head);
  size_t done = head;
  for (; done + kLine <= bytes; done += kLine) {
    next.fetch_line();
    for (size_t i = done; i < done + kLine; i += sizeof(__m128i)) {
      const __m128i word = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), word);
    }
  }
  _mm_sfence();
  std::memcpy(to + done, from + done, bytes - done);
#else
  std::memcpy(destination, source, bytes);
#endif
}

}  // namespace pg_sdma
