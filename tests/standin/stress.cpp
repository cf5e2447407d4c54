// All-gathers of forked ranks through the whole direct path on the stand-in, every byte of every
// output checked: first a table of sizes, forms and kinds of memory, then random ones, with buffers
// freed and allocated again in between.
//
//   stress [hip:]<driver> <folder> <ranks> <batches> <queues> <patience in us> <seed> [late]
//
// <folder> is empty and the group's own. <batches>: of random gathers. <queues>: hardware queues
// that a rank's streams share, 0 for one each. With HIP's names there are no chunks, which it does
// not share.
// With patience some operations go to the inner, which this test leaves out. With `late` a rank's
// host is late now and then, and operations go direct all the same.
#include <algorithm>
#include <cstring>
#include <deque>
#include <random>

#include "group.h"

using namespace pg_sdma;
using namespace standin_test;

namespace {

constexpr int kBatch = 8;  // random operations in flight before their outputs are looked at
constexpr size_t kChunk = size_t{1} << 16;
constexpr size_t kMostBytes = 5 * kChunk;
constexpr std::chrono::milliseconds kTimeout{60000};

unsigned char pattern(int rank, uint64_t operation, size_t piece, size_t at) {
  return static_cast<unsigned char>(131 * rank + 17 * operation + 59 * piece + at % 251);
}

void copy(Address to, Address from, size_t bytes) {
  REQUIRE(driver::cuMemcpyAsync(to, from, bytes, caller) == 0);
}

// One tensor of one operation. Its input is overwritten by the next operation as soon as the
// gather lets the caller's stream go on.
struct Tensor {
  size_t shard = 0;
  bool in_place = false;
  size_t offset = 0;  // of the input, where it is not in place
  size_t output_offset = 0;
};

// One call. As a list its outputs are tensors of their own, and peers read its input.
struct Operation {
  std::vector<Tensor> tensors;
  bool listed = false;
};

// What the ranks must draw alike, and what each draws for itself.
class Rank {
 public:
  Rank(int rank, int world, unsigned seed, bool chunks, bool late, DirectTransport& transport)
      : rank_(rank),
        world_(world),
        chunks_(chunks),
        late_(late),
        common_(seed),
        own_(seed * 97 + rank),
        transport_(transport) {}

  // One by one, coalesced and as a list, in place and not, from the first byte of an allocation and
  // from odd ones, in whole allocations and in chunks; sizes around what a chunk holds.
  void table() {
    for (const bool chunks : {false, true}) {
      if (chunks && !chunks_) break;
      for (auto& buffer : inputs_) buffer = allocate(kMostBytes, chunks);
      for (auto& buffer : outputs_) buffer = allocate(kMostBytes * world_, chunks);
      for (const size_t shard :
           {size_t{0}, size_t{1}, size_t{3}, kChunk - 1, kChunk, kChunk + 1, 4 * kChunk}) {
        std::vector<Operation> calls;
        for (const bool in_place : {false, true}) {
          for (const size_t offset : {size_t{0}, size_t{1}, kChunk - 1}) {
            const Tensor tensor{shard, in_place, offset, offset};
            calls.push_back({{tensor}});
            calls.push_back({{tensor, {}, {5, !in_place, offset, offset}}});
            calls.push_back({{tensor}, /*listed=*/true});
          }
        }
        carry(calls);
      }
    }
  }

  void batch() {
    renew_buffers();
    std::vector<Operation> calls(kBatch);
    for (Operation& call : calls) call = random_operation();
    carry(calls);
  }

  int direct() const { return direct_; }
  int inner() const { return inner_; }
  int deferred() const { return deferred_; }

 private:
  size_t draw(std::minstd_rand& random, size_t below) { return random() % below; }

  // Some of the buffers are freed and others come, often at the same addresses.
  void renew_buffers() {
    for (auto& buffer : inputs_) {
      if (buffer && draw(own_, 3) != 0) continue;
      buffer.reset();
      buffer = allocate(kMostBytes, chunks_ && draw(own_, 2) != 0);
    }
    for (auto& buffer : outputs_) {
      if (buffer && draw(own_, 3) != 0) continue;
      buffer.reset();
      buffer = allocate(kMostBytes * world_, chunks_ && draw(own_, 2) != 0);
    }
  }

  std::unique_ptr<Buffer> allocate(size_t bytes, bool chunks) const {
    if (chunks) return std::make_unique<Buffer>(bytes, kChunk, rank_);
    return std::make_unique<Buffer>(bytes);
  }

  Operation random_operation() {
    Operation made{std::vector<Tensor>(1 + draw(common_, kTensors))};
    made.listed = draw(common_, 2) == 0 && made.tensors.size() == 1;
    for (Tensor& tensor : made.tensors) {
      tensor.shard = draw(common_, 8) == 0 ? 0 : 1 + draw(common_, kMostBytes / 4);
      tensor.in_place = draw(own_, 2) == 0;
      tensor.offset = draw(own_, kMostBytes - tensor.shard);
      tensor.output_offset = draw(own_, (kMostBytes - tensor.shard) * world_);
    }
    return made;
  }

  // All in flight at once.
  void carry(const std::vector<Operation>& calls) {
    std::vector<std::function<void()>> checks;
    std::deque<Buffer> temporaries;
    caller = draw(own_, 3) == 0 ? nullptr : stream_;
    for (const Operation& made : calls) gather(made, temporaries, checks);
    REQUIRE(cuStreamSynchronize(caller) == 0);
    for (const auto& check : checks) check();
  }

  void gather(const Operation& made, std::deque<Buffer>& temporaries,
              std::vector<std::function<void()>>& checks) {
    const std::vector<Tensor>& tensors = made.tensors;
    const uint64_t operation = ++operation_;
    Call call;
    call.operation = "stress";
    call.dtype = "uint8";
    call.listed = made.listed;
    call.timeout = kTimeout;
    for (size_t p = 0; p < tensors.size(); ++p) {
      prepare(temporaries, tensors[p], p, operation);
      call.pieces.push_back(piece(tensors[p], p));
    }
    // Some for longer than others, so that they meet others late, and come in another order.
    if (late_ && draw(own_, 6) == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(draw(own_, 3000)));
    }
    const pg_sdma::Operation agreed = transport_.agree(call);
    if (!agreed.decision.direct) {
      ++inner_;
      return;
    }
    ++direct_;
    deferred_ += agreed.in_order_of_arrival();
    if (draw(own_, 2) == 0) {
      transport_.queue().follow_caller();
    } else {
      transport_.queue().use_callers_stream();
    }
    transport_.run(call, agreed);
    transport_.queue().caller_follows();
    for (size_t p = 0; p < tensors.size(); ++p) look(temporaries, checks, tensors[p], p, operation);
  }

  Address output(const Tensor& tensor, size_t p) const {
    return outputs_[p]->base() + tensor.output_offset;
  }

  Address input(const Tensor& tensor, size_t p) const {
    return tensor.in_place ? output(tensor, p) + rank_ * tensor.shard
                           : inputs_[p]->base() + tensor.offset;
  }

  Piece piece(const Tensor& tensor, size_t p) const {
    Piece piece{reinterpret_cast<void*>(input(tensor, p)), tensor.shard, {}};
    for (int rank = 0; rank < world_; ++rank) {
      piece.outputs.push_back(reinterpret_cast<void*>(output(tensor, p) + rank * tensor.shard));
    }
    return piece;
  }

  // Poisons the output and then puts the pattern into the input, on the caller's stream.
  void prepare(std::deque<Buffer>& temporaries, const Tensor& tensor, size_t p,
               uint64_t operation) {
    if (tensor.shard == 0) return;
    Buffer& poison = temporaries.emplace_back(tensor.shard * world_);
    std::memset(poison.data(), 0xA5, poison.bytes());
    copy(output(tensor, p), poison.base(), poison.bytes());
    Buffer& content = temporaries.emplace_back(tensor.shard);
    for (size_t i = 0; i < tensor.shard; ++i) {
      content.data()[i] = pattern(rank_, operation, p, i);
    }
    copy(input(tensor, p), content.base(), tensor.shard);
  }

  // Copies the output away on the caller's stream, to be looked at when the batch is over.
  void look(std::deque<Buffer>& temporaries, std::vector<std::function<void()>>& checks,
            const Tensor& tensor, size_t p, uint64_t operation) {
    if (tensor.shard == 0) return;
    Buffer& seen = temporaries.emplace_back(tensor.shard * world_);
    copy(seen.base(), output(tensor, p), seen.bytes());
    checks.push_back([this, &seen, tensor, p, operation] {
      for (int rank = 0; rank < world_; ++rank) {
        for (size_t i = 0; i < tensor.shard; ++i) {
          const unsigned char found = seen.data()[rank * tensor.shard + i];
          if (found == pattern(rank, operation, p, i)) continue;
          std::fprintf(stderr, "rank %d: operation %lu, tensor %zu: byte %zu of rank %d is %d\n",
                       rank_, operation, p, i, rank, found);
          std::_Exit(1);
        }
      }
    });
  }

  static constexpr size_t kTensors = 3;
  int rank_;
  int world_;
  bool chunks_;
  bool late_;
  std::minstd_rand common_;
  std::minstd_rand own_;
  const Stream stream_ = caller;
  DirectTransport& transport_;
  uint64_t operation_ = 0;
  int direct_ = 0;
  int inner_ = 0;
  int deferred_ = 0;
  std::unique_ptr<Buffer> inputs_[kTensors];
  std::unique_ptr<Buffer> outputs_[kTensors];
};

}  // namespace

int main(int argc, char** argv) {
  REQUIRE(argc == 8 || argc == 9);
  const bool late = argc == 9;
  const std::string driver_path = argv[1];
  const std::string folder = argv[2];
  const int world = std::atoi(argv[3]);
  const int batches = std::atoi(argv[4]);
  const int queues = std::atoi(argv[5]);
  const auto seed = static_cast<unsigned>(std::atoi(argv[7]));

  return run_ranks(world, [&](int rank) {
    std::optional<std::chrono::microseconds> patience(std::atoi(argv[6]));
    if (late) patience.reset();  // what is late is the default's
    auto transport = join(driver_path, folder, rank, world, patience, queues, late);
    {
      Rank self(rank, world, seed, !by_hip(driver_path), late, *transport);
      self.table();
      for (int i = 0; i < batches; ++i) self.batch();
      std::printf("rank %d: %d direct, %d inner, %zu bytes mapped, %ld batched, %d deferred\n",
                  rank, self.direct(), self.inner(), standin_mapped(),
                  standin_calls("cuMemcpyBatchAsync"), self.deferred());
      std::fflush(stdout);
    }
    // The buffers are freed, and nothing is gathered any more: peers let go of them all the same.
    REQUIRE(soon([] { return standin_mapped() == 0; }));
    transport.reset();
  });
}
