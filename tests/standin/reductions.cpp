// Random reduce-scatters of forked ranks through the whole direct path on the stand-in, every bit
// of every output compared with a plain sum in rank order, every input overwritten behind its
// operation.
//
//   reductions [hip:]<driver> <folder> <ranks> <cases> <queues> <room> <patience in us> <seed>
//
// <folder> is empty and the group's own. <queues>: hardware queues that a rank's streams share, 0
// for one each. <room>: the most bytes of a peer's slice that land at a time. With patience some
// operations go to the inner, which this test leaves out.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <deque>
#include <random>
#include <thread>

#include "group.h"

using namespace pg_sdma;
using namespace standin_test;

namespace {

constexpr int kInFlight = 4;            // operations, before their outputs are looked at
constexpr size_t kMostElements = 6000;  // of a slice
constexpr uint64_t kMostLandings = 4;
constexpr size_t kGuard = 64;
constexpr unsigned char kPoison = 0xA5;
constexpr std::chrono::milliseconds kTimeout{60000};
constexpr std::chrono::milliseconds kSlow{1};

enum class Type : uint32_t { kFloat, kBfloat16 };
size_t size_of(Type type) { return type == Type::kFloat ? 4 : 2; }

float widen(Type type, const void* data, size_t i) {
  if (type == Type::kFloat) return static_cast<const float*>(data)[i];
  return std::bit_cast<float>(uint32_t{static_cast<const uint16_t*>(data)[i]} << 16);
}

// To nearest, ties to even. Nothing here is NaN.
void narrow(Type type, void* data, size_t i, float value) {
  if (type == Type::kFloat) {
    static_cast<float*>(data)[i] = value;
    return;
  }
  const auto bits = std::bit_cast<uint32_t>(value);
  static_cast<uint16_t*>(data)[i] =
      static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// A number of some magnitude, so that the order of a sum shows in its last bits.
float number(uint64_t operation, size_t tensor, int rank, size_t i) {
  uint64_t hash = operation * 0x9e3779b97f4a7c15 + tensor * 0xbf58476d1ce4e5b9 +
                  static_cast<uint64_t>(rank) * 0x94d049bb133111eb + i * 0xd6e8feb86659fd93;
  hash = (hash ^ (hash >> 31)) * 0xff51afd7ed558ccd;
  hash ^= hash >> 33;
  const auto magnitude = static_cast<int>(hash >> 56) % 17 - 8;
  return std::ldexp(static_cast<float>(static_cast<int32_t>(hash)) / 2147483648.0f, magnitude);
}

// What the group's kernel is "compiled" for.
struct Kind {
  Type type;
  uint16_t world;
  uint16_t rank;
};

// The kernel: arguments as kernels.h has them, and what a real one is compiled for behind them.
void sum(void** arguments) {
  const auto word = [&](size_t i) { return *static_cast<uint64_t*>(arguments[i]); };
  auto* const output = reinterpret_cast<void*>(word(0));
  const auto* const own = reinterpret_cast<const void*>(word(1));
  const auto* const landing = reinterpret_cast<const unsigned char*>(word(2));
  const auto kind = std::bit_cast<Kind>(word(6));
  const auto factor = static_cast<float>(std::bit_cast<double>(word(5)));
  REQUIRE(reinterpret_cast<uintptr_t>(landing) % kMostElement == 0);
  // Some sums are slow, so that whoever does not wait for one is seen.
  if (word(0) / kGuard % 4 == 0) std::this_thread::sleep_for(kSlow);
  for (size_t i = 0; i < word(4); ++i) {
    float total = 0;
    for (int rank = 0; rank < kind.world; ++rank) {
      const auto row = static_cast<size_t>(rank - (rank > kind.rank ? 1 : 0));
      const void* slice = rank == kind.rank ? own : landing + row * word(3) * size_of(kind.type);
      const float part = widen(kind.type, slice, i);
      total = rank == 0 ? part : total + part;
    }
    narrow(kind.type, output, i, total * factor);
  }
}

class TestReducer final : public Reducer {
 public:
  TestReducer(Type type, int rank, int world, int landings, size_t room, double factor)
      : type_(type),
        rank_(rank),
        world_(world),
        landings_(landings),
        room_(room),
        factor_(factor),
        memory_(static_cast<size_t>(landings_) * room * static_cast<size_t>(world)) {}

  int landings() const override { return landings_; }
  size_t room() const override { return room_; }
  void* landing(int which, int peer) override {
    return base(which) + static_cast<size_t>(peer < rank_ ? peer : peer - 1) * room_;
  }
  Launch launch(const Share& share, size_t offset, size_t bytes, int which, size_t at) override {
    REQUIRE(offset % kMostElement == 0 && at + bytes <= room_);
    Launch launch;
    launch.function = reinterpret_cast<void*>(&sum);
    launch.blocks = 1;
    launch.threads = 32;
    const auto address = [](const void* data) { return reinterpret_cast<uint64_t>(data); };
    const Kind kind{type_, static_cast<uint16_t>(world_), static_cast<uint16_t>(rank_)};
    launch.arguments = {
        address(share.output) + offset, address(share.slices[static_cast<size_t>(rank_)]) + offset,
        address(base(which) + at),      room_ / size_of(type_),
        bytes / size_of(type_),         std::bit_cast<uint64_t>(factor_),
        std::bit_cast<uint64_t>(kind)};
    return launch;
  }

 private:
  unsigned char* base(int which) const {
    return memory_.data() + static_cast<size_t>(which) * room_ * static_cast<size_t>(world_ - 1);
  }

  Type type_;
  int rank_;
  int world_;
  int landings_;
  size_t room_;
  double factor_;
  Buffer memory_;
};

// One tensor: the slices one behind the other or each by itself, and the output.
struct Tensor {
  size_t count = 0;  // elements of a slice
  bool in_place = false;
  size_t shift = 0;  // elements
};

// What the ranks draw alike, and what each draws for itself.
class Rank {
 public:
  Rank(int rank, int world, size_t room, unsigned seed, bool chunks, DirectTransport& transport)
      : chunks_(chunks),
        rank_(rank),
        world_(world),
        room_(room),
        common_(seed),
        own_(seed * 97 + static_cast<unsigned>(rank)),
        transport_(transport) {}

  void run(int cases) {
    for (int done = 0; done < cases; done += kInFlight) {
      for (int i = 0; i < kInFlight; ++i) scatter();
      REQUIRE(cuStreamSynchronize(caller) == 0);
      for (const auto& check : checks_) check();
      checks_.clear();
      reducers_.clear();
      buffers_.clear();
    }
  }

  int direct() const { return direct_; }
  int inner() const { return inner_; }

 private:
  static size_t draw(std::minstd_rand& random, size_t below) { return random() % below; }

  Buffer& buffer(size_t bytes) {
    // Some of it in chunks that peers open one by one.
    if (chunks_ && draw(own_, 4) == 0) return buffers_.emplace_back(bytes, size_t{1} << 16, rank_);
    return buffers_.emplace_back(bytes);
  }

  static void copy(Address to, Address from, size_t bytes) {
    REQUIRE(driver::cuMemcpyAsync(to, from, bytes, caller) == 0);
  }
  // On the caller's stream.
  void fill(Address to, size_t bytes, unsigned char value) {
    if (bytes == 0) return;
    Buffer& content = buffers_.emplace_back(bytes);
    std::memset(content.data(), value, bytes);
    copy(to, content.base(), bytes);
  }

  void scatter() {
    const uint64_t operation = ++operation_;
    const Type type = draw(common_, 2) == 0 ? Type::kFloat : Type::kBfloat16;
    const bool listed = draw(common_, 4) == 0;
    const double factor = draw(common_, 2) == 0 ? 1 : 0.3359375;
    std::vector<Tensor> tensors(listed ? 1 : 1 + draw(common_, 4));
    for (Tensor& tensor : tensors) {
      tensor.count = draw(common_, 8) == 0 ? 0 : 1 + draw(common_, kMostElements);
      tensor.in_place = draw(own_, 2) == 0;
      tensor.shift = draw(own_, 5);
    }
    Call call;
    call.operation = "reductions";
    call.dtype = type == Type::kFloat ? "Float" : "BFloat16";
    call.reduction = "sum times " + std::to_string(factor);
    call.listed = listed;
    call.timeout = kTimeout;
    std::vector<Address> inputs;
    for (size_t t = 0; t < tensors.size(); ++t) add(call, inputs, type, tensors[t], t, operation);

    const pg_sdma::Operation agreed = transport_.agree(call);
    if (!agreed.decision.direct) {
      ++inner_;
      return;
    }
    ++direct_;
    const int landings = 1 + static_cast<int>(operation % kMostLandings);
    Reducer& reducer = reducers_.emplace_back(type, rank_, world_, landings, room_, factor);
    if (draw(own_, 2) == 0) {
      transport_.queue().follow_caller();
    } else {
      transport_.queue().use_callers_stream();
    }
    transport_.run(call, agreed, reducer);
    transport_.queue().caller_follows();
    for (size_t t = 0; t < tensors.size(); ++t) {
      look(call.shares[t], type, factor, t, operation);
      // Behind the operation: whatever is still read of it then is wrong.
      for (int rank = 0; rank < world_; ++rank) {
        const auto slice = reinterpret_cast<Address>(call.shares[t].slices[rank]);
        fill(slice, call.shares[t].bytes, 0x5A);
      }
    }
  }

  // Enqueues what makes the tensor's input, and the poison around and in its output.
  void add(Call& call, std::vector<Address>& inputs, Type type, const Tensor& tensor, size_t t,
           uint64_t operation) {
    const size_t bytes = tensor.count * size_of(type);
    // Listed slices lie apart.
    const size_t stride = bytes + (call.listed ? 2 * size_of(type) : 0);
    const size_t shift = tensor.shift * size_of(type);
    const size_t whole = stride * static_cast<size_t>(world_) + shift;
    Buffer& input = buffer(whole + 16);
    Buffer& content = buffers_.emplace_back(whole + 16);
    std::memset(content.data(), 0x5A, content.bytes());
    Share share;
    share.tensor = t;
    share.bytes = bytes;
    for (int to = 0; to < world_; ++to) {
      const size_t first = shift + stride * static_cast<size_t>(to);
      for (size_t i = 0; i < tensor.count; ++i) {
        const size_t at = static_cast<size_t>(to) * tensor.count + i;
        narrow(type, content.data() + first, i, number(operation, t, rank_, at));
      }
      share.slices.push_back(input.data() + first);
    }
    copy(input.base(), content.base(), whole);
    if (tensor.in_place) {
      share.output = const_cast<void*>(share.slices[static_cast<size_t>(rank_)]);
    } else {
      Buffer& output = buffer(bytes + shift + 2 * kGuard);
      fill(output.base(), output.bytes(), kPoison);
      share.output = output.data() + kGuard + shift;
      guarded_[{operation, t}] = &output;
    }
    inputs.push_back(input.base());
    call.shares.push_back(std::move(share));
  }

  // Copies the output away on the caller's stream, to be looked at when all is over.
  void look(const Share& share, Type type, double factor, size_t t, uint64_t operation) {
    const size_t count = share.bytes / size_of(type);
    if (const auto at = guarded_.find({operation, t}); at != guarded_.end()) {
      Buffer* const output = at->second;
      const auto first =
          static_cast<size_t>(static_cast<unsigned char*>(share.output) - output->data());
      const size_t bytes = share.bytes;
      checks_.push_back([output, first, bytes] {
        for (size_t i = 0; i < output->bytes(); ++i) {
          if (i < first || i >= first + bytes) REQUIRE(output->data()[i] == kPoison);
        }
      });
      guarded_.erase(at);
    }
    if (count == 0) return;
    Buffer& seen = buffers_.emplace_back(share.bytes);
    copy(seen.base(), reinterpret_cast<Address>(share.output), share.bytes);
    checks_.push_back([this, &seen, type, factor, t, operation, count] {
      std::vector<float> expected(1);
      for (size_t i = 0; i < count; ++i) {
        float total = 0;
        for (int rank = 0; rank < world_; ++rank) {
          float part = number(operation, t, rank, static_cast<size_t>(rank_) * count + i);
          narrow(type, expected.data(), 0, part);
          part = widen(type, expected.data(), 0);
          total = rank == 0 ? part : total + part;
        }
        narrow(type, expected.data(), 0, total * static_cast<float>(factor));
        if (std::memcmp(expected.data(), seen.data() + i * size_of(type), size_of(type)) == 0) {
          continue;
        }
        std::fprintf(stderr, "rank %d: operation %lu, tensor %zu: number %zu of %zu is wrong\n",
                     rank_, operation, t, i, count);
        std::_Exit(1);
      }
    });
  }

  bool chunks_;
  int rank_;
  int world_;
  size_t room_;
  std::minstd_rand common_;
  std::minstd_rand own_;
  DirectTransport& transport_;
  uint64_t operation_ = 0;
  int direct_ = 0;
  int inner_ = 0;
  std::deque<Buffer> buffers_;
  std::deque<TestReducer> reducers_;
  std::map<std::pair<uint64_t, size_t>, Buffer*> guarded_;
  std::vector<std::function<void()>> checks_;
};

}  // namespace

int main(int argc, char** argv) {
  REQUIRE(argc == 9);
  const std::string driver_path = argv[1];
  const std::string folder = argv[2];
  const int world = std::atoi(argv[3]);
  const int cases = std::atoi(argv[4]);
  const int queues = std::atoi(argv[5]);
  const auto room = static_cast<size_t>(std::atol(argv[6]));
  const auto seed = static_cast<unsigned>(std::atoi(argv[8]));

  return run_ranks(world, [&](int rank) {
    const std::chrono::microseconds patience(std::atoi(argv[7]));
    auto transport = join(driver_path, folder, rank, world, patience, queues);
    {
      Rank self(rank, world, room, seed, !by_hip(driver_path), *transport);
      self.run(cases);
      std::printf("rank %d: %d direct, %d inner, %ld launches\n", rank, self.direct(), self.inner(),
                  standin_calls("cuLaunchKernel"));  // HIP's function calls it
      std::fflush(stdout);
    }
    REQUIRE(soon([] { return standin_mapped() == 0; }));
    transport.reset();
  });
}
