// How fast two processes can gather each other's memory, without a backend around it.
//
//   g++ -O2 -std=c++20 -o bare benchmarks/cpu/bare.cpp && ./bare
//
// Both processes fork from one and gather at once. Each call takes other memory, so no cache holds
// it. It prints a line for each way and shard: the median of the calls, and the fastest and slowest
// tenth.
#include <emmintrin.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

namespace {

constexpr size_t kArena = size_t{256} << 20;
constexpr size_t kWave = size_t{256} << 10;
constexpr size_t kSlots = size_t{1} << 20;  // of one process, at most
constexpr int kCalls = 40;

struct Shared {
  struct alignas(64) Side {
    std::atomic<uint64_t> at_barrier, filled, emptied;
    std::atomic<char*> input;
    std::atomic<pid_t> process;
  } sides[2];
  alignas(4096) char slots[2][kSlots];
};

struct Call {
  const char* input;  // of this process
  const char* peers;  // an address in the other process
  char* own_output;
  char* peers_output;
  size_t bytes;
};

class Gatherer {
 public:
  Gatherer(Shared& shared, int rank)
      : own_(shared.sides[rank]),
        peer_(shared.sides[1 - rank]),
        own_slots_(shared.slots[rank]),
        peers_slots_(shared.slots[1 - rank]) {}

  void barrier() {
    own_.at_barrier = ++barriers_;
    while (peer_.at_barrier < barriers_) _mm_pause();
  }

  void pull_then_copy(const Call& call) {
    pull(call, 0, call.bytes);
    std::memcpy(call.own_output, call.input, call.bytes);
  }

  void pull_in_place(const Call& call) { pull(call, 0, call.bytes); }

  void waves(const Call& call) {
    for (size_t at = 0; at < call.bytes; at += kWave) {
      const size_t bytes = std::min(kWave, call.bytes - at);
      copy_past_caches(call.own_output + at, call.input + at, bytes);
      pull(call, at, bytes);
    }
  }

  // `total`: bytes of this process's slots. `prefetch`: copies past the caches fetch what is filled
  // next.
  void slots(const Call& call, size_t slot, size_t total, bool prefetch, bool in_place) {
    const uint64_t count = total / slot;
    const auto ahead = [&](size_t put) {
      return prefetch && put < call.bytes ? call.input + put : nullptr;
    };
    for (size_t put = 0, taken = 0; taken < call.bytes;) {
      if (put < call.bytes && put <= taken + slot && filled_ - peer_.emptied < count) {
        char* to = own_slots_ + filled_ % count * slot;
        std::memcpy(to, call.input + put, slot);
        own_.filled = ++filled_;
        if (!in_place) copy_past_caches(call.own_output + put, to, slot, ahead(put + slot));
        put += slot;
      } else if (peer_.filled > emptied_) {
        const char* from = peers_slots_ + emptied_ % count * slot;
        copy_past_caches(call.peers_output + taken, from, slot, ahead(put));
        own_.emptied = ++emptied_;
        taken += slot;
      } else {
        _mm_pause();
      }
    }
  }

 private:
  void pull(const Call& call, size_t at, size_t bytes) {
    iovec local{call.peers_output + at, bytes};
    iovec remote{const_cast<char*>(call.peers) + at, bytes};
    if (process_vm_readv(peer_.process, &local, 1, &remote, 1, 0) != static_cast<ssize_t>(bytes)) {
      std::perror("process_vm_readv");
      std::exit(1);
    }
  }

  // Fetches as many bytes of `ahead`, where there is one.
  static void copy_past_caches(char* to, const char* from, size_t bytes,
                               const char* ahead = nullptr) {
    for (size_t i = 0; i < bytes; i += sizeof(__m128i)) {
      if (ahead != nullptr && i % 64 == 0) _mm_prefetch(ahead + i, _MM_HINT_T0);
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
    }
    _mm_sfence();
  }

  Shared::Side& own_;
  Shared::Side& peer_;
  char* own_slots_;
  const char* peers_slots_;
  uint64_t barriers_ = 0;
  uint64_t filled_ = 0;
  uint64_t emptied_ = 0;
};

char* allocate(size_t bytes, int visibility) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, visibility | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("mmap");
    std::exit(1);
  }
  return static_cast<char*>(memory);
}

void measure(Shared& shared, int rank) {
  Gatherer gatherer(shared, rank);
  char* inputs = allocate(kArena, MAP_PRIVATE);
  char* outputs = allocate(2 * kArena, MAP_PRIVATE);
  std::memset(inputs, 1 + rank, kArena);
  std::memset(outputs, 0, 2 * kArena);
  shared.sides[rank].input = inputs;
  gatherer.barrier();
  const char* peers = shared.sides[1 - rank].input;

  using Way = std::function<void(const Call&)>;
  std::vector<std::pair<std::string, Way>> ways{
      {"pull, then copy own", [&](const Call& call) { gatherer.pull_then_copy(call); }},
      {"waves of 256 KiB", [&](const Call& call) { gatherer.waves(call); }},
  };
  const auto add_slots = [&](const char* name, size_t slot, size_t total, bool prefetch,
                             bool in_place) {
    ways.emplace_back((in_place ? "in place: " : "") + std::string(name),
                      [&gatherer, slot, total, prefetch, in_place](const Call& call) {
                        gatherer.slots(call, slot, total, prefetch, in_place);
                      });
  };
  for (const bool in_place : {false, true}) {
    if (in_place) {
      ways.emplace_back("in place: pull", [&](const Call& call) { gatherer.pull_in_place(call); });
    }
    add_slots("slots of 128 KiB, 4", 128 << 10, 512 << 10, false, in_place);
    add_slots("slots of 64 KiB, 8", 64 << 10, 512 << 10, false, in_place);
    add_slots("slots of 64 KiB, 8, prefetch", 64 << 10, 512 << 10, true, in_place);
    add_slots("slots of 64 KiB, 16", 64 << 10, 1 << 20, false, in_place);
    add_slots("slots of 64 KiB, 16, prefetch", 64 << 10, 1 << 20, true, in_place);
  }
  if (rank == 0)
    std::printf("%8s  %-38s %8s %8s %8s\n", "shard", "", "median", "fastest", "slowest");
  for (const size_t bytes : {size_t{512} << 10, size_t{2} << 20, size_t{8} << 20}) {
    for (const auto& [name, way] : ways) {
      std::vector<double> microseconds;
      for (int i = 0; i < kCalls; ++i) {
        const size_t at = static_cast<size_t>(i) % (kArena / bytes) * bytes;
        char* output = outputs + 2 * at;
        const Call call{inputs + at, peers + at, output + bytes * rank, output + bytes * (1 - rank),
                        bytes};
        gatherer.barrier();
        const auto began = std::chrono::steady_clock::now();
        way(call);
        gatherer.barrier();
        microseconds.push_back(
            std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - began)
                .count());
        const char peers_byte = static_cast<char>(2 - rank);
        if (call.peers_output[0] != peers_byte || call.peers_output[bytes - 1] != peers_byte) {
          std::fprintf(stderr, "%s: wrong bytes\n", name.c_str());
          std::exit(1);
        }
      }
      std::sort(microseconds.begin(), microseconds.end());
      if (rank == 0) {
        std::printf("%7zuK  %-38s %8.0f %8.0f %8.0f us\n", bytes >> 10, name.c_str(),
                    microseconds[kCalls / 2], microseconds[kCalls / 10],
                    microseconds[kCalls - kCalls / 10 - 1]);
      }
    }
  }
}

}  // namespace

int main() {
  auto* shared = reinterpret_cast<Shared*>(allocate(sizeof(Shared), MAP_SHARED));
  const pid_t child = fork();
  const int rank = child == 0 ? 1 : 0;
  shared->sides[rank].process = getpid();
  measure(*shared, rank);
  std::fflush(stdout);
  if (child != 0) {
    int status = 0;
    waitpid(child, &status, 0);
    return status == 0 ? 0 : 1;
  }
}
