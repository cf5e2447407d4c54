// Random all-gathers and reduce-scatters of one rank over a transport, every byte of every output
// checked. All ranks draw the same calls from the same seed; delays, layouts and what is in place
// each draws for itself.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "random_reductions.h"
#include "transport/direct_transport.h"

namespace stress {

// Ends the process: with ranks as threads and as processes this fails the whole run.
template <class... Parts>
[[noreturn]] void give_up(const char* format, Parts... parts) {
  std::fprintf(stderr, format, parts...);
  std::fputc('\n', stderr);
  std::fflush(stderr);
  std::_Exit(1);
}

// How a rank went on from an operation. kNone: it never ended it.
enum class Went : uint8_t { kNone, kDirect, kInner, kError };

struct Setting {
  int world = 2;
  uint64_t operations = 100;
  unsigned seed = 1;
  std::chrono::microseconds patience{0};
  std::chrono::milliseconds timeout{60000};
};

// One call as all ranks draw it. At most one rank makes it badly.
struct Plan {
  enum class Bad { kNone, kInvalid, kOtherSize, kOtherType, kOtherCount, kOtherReduction };

  std::vector<size_t> shards;  // bytes of each tensor's; of a reduce-scatter, of one slice
  bool reduces = false;
  bool listed = false;
  Bad bad = Bad::kNone;
  int bad_rank = 0;

  Plan(const Setting& setting, uint64_t operation) {
    std::minstd_rand random(setting.seed * 7919 + static_cast<unsigned>(operation) * 104729 + 1);
    random.discard(3);
    reduces = random() % 3 == 0;
    const auto draw = [&](size_t below) { return static_cast<size_t>(random()) % below; };
    const size_t tensors = draw(20) == 0 ? pg_sdma::kMaxTensors : 1 + draw(4);
    const size_t large = draw(25) == 0 ? draw(tensors) : tensors;
    for (size_t t = 0; t < tensors; ++t) {
      const size_t most = t == large ? size_t{3} << 20 : draw(4) == 0 ? 65536 : 300;
      shards.push_back(draw(8) == 0 ? 0 : 1 + draw(most));
    }
    if (reduces && draw(4) == 0) {
      listed = true;
      shards.resize(1);
    }
    if (draw(12) == 0) {
      bad = static_cast<Bad>(1 + draw(reduces ? 5 : 4));
      bad_rank = static_cast<int>(draw(static_cast<size_t>(setting.world)));
    }
  }
};

class Rank {
 public:
  Rank(const Setting& setting, int rank, pg_sdma::DirectTransport& transport)
      : setting_(setting),
        rank_(rank),
        transport_(transport),
        own_(setting.seed * 31 + static_cast<unsigned>(rank) + 17) {}

  // Makes the next call. Throws GroupFault as the transport does.
  Went gather() {
    const Plan plan(setting_, ++operation_);
    dawdle();
    if (plan.reduces) return scatter(plan);
    std::vector<Tensor> tensors;
    for (size_t t = 0; t < plan.shards.size(); ++t) {
      tensors.emplace_back(setting_.world, rank_, plan.shards[t], draw(3) == 0, draw(2) == 0);
      fill(tensors[t].input(), plan.shards[t], rank_, t);
    }
    pg_sdma::Call call = call_of(plan, tensors);
    pg_sdma::Operation operation;
    try {
      operation = transport_.agree(call);
      if (!operation.decision.direct) {
        if (setting_.patience.count() == 0) give_up("rank %d: late without patience", rank_);
        untouched(tensors);
        return Went::kInner;
      }
    } catch (const pg_sdma::BadCall& error) {
      untouched(tensors);
      return explained(plan, call, error.what());
    }
    if (plan.bad != Plan::Bad::kNone) {
      give_up("rank %d: operation %lu went direct, and is bad", rank_, operation_);
    }
    if (draw(4) == 0) dawdle();
    transport_.run(call, operation);
    // Every peer has read the inputs now.
    for (Tensor& tensor : tensors) tensor.scribble();
    for (size_t t = 0; t < tensors.size(); ++t) check(tensors[t], t);
    return Went::kDirect;
  }

  uint64_t operation() const { return operation_; }

 private:
  Went scatter(const Plan& plan) {
    std::vector<Scattered> tensors;
    pg_sdma::Call call;
    call.operation = "stress_reduce_scatter";
    call.dtype = "Byte";
    call.reduction = "SUM";
    call.listed = plan.listed;
    call.timeout = setting_.timeout;
    for (const size_t bytes : plan.shards) {
      tensors.emplace_back(setting_.world, rank_, bytes, draw(3) == 0, plan.listed);
    }
    for (size_t t = 0; t < tensors.size(); ++t) {
      for (int r = 0; r < setting_.world; ++r) {
        fill(tensors[t].slice(r), tensors[t].bytes, rank_, slice_number(t, r));
      }
      call.shares.push_back(tensors[t].share(t));
    }
    if (rank_ == plan.bad_rank) spoil(plan, call);
    const auto unchanged = [&] {
      for (size_t t = 0; t < tensors.size(); ++t) {
        std::vector<unsigned char> before(tensors[t].bytes, Scattered::kPoison);
        if (tensors[t].in_place) {
          fill(before.data(), before.size(), rank_, slice_number(t, rank_));
        }
        expect(tensors[t].holds(before), "written to, and not direct");
      }
    };
    // As small as it may be, now and then: one chunk of many.
    const size_t room = pg_sdma::kMostElement * (1 + draw(draw(3) == 0 ? 4 : 5000));
    ByteReducer reducer(rank_, setting_.world, room);
    pg_sdma::Operation operation;
    try {
      operation = transport_.agree(call);
      if (!operation.decision.direct) {
        if (setting_.patience.count() == 0) give_up("rank %d: late without patience", rank_);
        unchanged();
        return Went::kInner;
      }
    } catch (const pg_sdma::BadCall& error) {
      unchanged();
      return explained(plan, call, error.what());
    }
    expect(plan.bad == Plan::Bad::kNone, "direct, and is bad");
    if (draw(4) == 0) dawdle();
    transport_.run(call, operation, reducer);
    for (Scattered& tensor : tensors) tensor.scribble();
    for (size_t t = 0; t < tensors.size(); ++t) {
      std::vector<unsigned char> right(tensors[t].bytes, 0);
      std::vector<unsigned char> slice(tensors[t].bytes);
      for (int r = 0; r < setting_.world; ++r) {
        fill(slice.data(), slice.size(), r, slice_number(t, rank_));
        for (size_t i = 0; i < right.size(); ++i) right[i] = then(right[i], slice[i]);
      }
      expect(tensors[t].holds(right), "wrong");
    }
    return Went::kDirect;
  }

  static size_t slice_number(size_t tensor, int rank) {
    return 1000 + 64 * static_cast<size_t>(rank) + tensor;
  }

  void expect(bool right, const char* otherwise) const {
    if (!right)
      give_up("rank %d: operation %lu (reduce-scatter): %s", rank_, operation_, otherwise);
  }

  void spoil(const Plan& plan, pg_sdma::Call& call) const {
    switch (plan.bad) {
      case Plan::Bad::kNone:
        break;
      case Plan::Bad::kInvalid:
        call.invalid = invalid_text(rank_);
        call.shares.clear();
        break;
      case Plan::Bad::kOtherSize:
        call.shares.back().bytes += 8;
        break;
      case Plan::Bad::kOtherType:
        call.dtype = "Float";
        break;
      case Plan::Bad::kOtherCount:
        call.shares.pop_back();
        break;
      case Plan::Bad::kOtherReduction:
        call.reduction = "AVG";
        break;
    }
  }

 private:
  static constexpr size_t kGuard = 32;
  static constexpr unsigned char kPoison = 0xA5;

  // An input and its outputs, with guards around them all.
  struct Tensor {
    Tensor(int world, int rank, size_t bytes, bool in_place, bool scattered)
        : rank(rank),
          bytes(bytes),
          in_place(in_place),
          // Odd distances where outputs are tensors of their own.
          stride(bytes + (scattered ? kGuard + 1 : 0)),
          output(stride * static_cast<size_t>(world) + 2 * kGuard, kPoison),
          own_input(in_place ? 0 : bytes + 1, kPoison) {}

    unsigned char* shard(int of) { return output.data() + kGuard + stride * of; }
    unsigned char* input() { return in_place ? shard(rank) : own_input.data() + 1; }
    void scribble() {
      if (!in_place) std::memset(input(), 0x5A, bytes);
    }

    int rank;
    size_t bytes;
    bool in_place;
    size_t stride;
    std::vector<unsigned char> output;
    std::vector<unsigned char> own_input;
  };

  size_t draw(size_t below) { return static_cast<size_t>(own_()) % below; }

  void dawdle() {
    if (draw(4) != 0) return;
    // Now and then longer than any patience.
    const auto patience = static_cast<size_t>(setting_.patience.count());
    if (patience > 0 && draw(40) == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(2 * patience));
      return;
    }
    const size_t most = draw(6) == 0 ? 3000 : 200;
    std::this_thread::sleep_for(std::chrono::microseconds(draw(most)));
  }

  pg_sdma::Call call_of(const Plan& plan, std::vector<Tensor>& tensors) {
    pg_sdma::Call call;
    call.operation = "stress_all_gather";
    call.dtype = "Byte";
    call.timeout = setting_.timeout;
    call.overlapped = draw(16) == 0;  // ranks may differ in it
    for (Tensor& tensor : tensors) {
      pg_sdma::Piece piece{tensor.input(), tensor.bytes, {}};
      for (int r = 0; r < setting_.world; ++r) piece.outputs.push_back(tensor.shard(r));
      call.pieces.push_back(std::move(piece));
    }
    if (rank_ != plan.bad_rank) return call;
    switch (plan.bad) {
      case Plan::Bad::kNone:
        break;
      case Plan::Bad::kInvalid:
        call.invalid = invalid_text(rank_);
        call.pieces.clear();
        break;
      case Plan::Bad::kOtherSize:
        call.pieces.back().bytes += 8;
        break;
      case Plan::Bad::kOtherType:
        call.dtype = "Float";
        break;
      case Plan::Bad::kOtherCount:
        call.pieces.pop_back();
        break;
      case Plan::Bad::kOtherReduction:
        break;
    }
    return call;
  }

  static std::string invalid_text(int rank) {
    return "rank " + std::to_string(rank) + ": made badly on purpose";
  }

  // Whether a raised error is the right one.
  Went explained(const Plan& plan, const pg_sdma::Call& call, const std::string& what) {
    // A rank whose own call is bad raises though its peers have gone on without it.
    if (!call.invalid.empty() && what == call.invalid) {
      if (setting_.patience.count() == 0) give_up("rank %d: raised alone", rank_);
      return Went::kInner;
    }
    const std::string expected =
        plan.bad == Plan::Bad::kInvalid
            ? invalid_text(plan.bad_rank)
            : std::string(plan.reduces ? "stress_reduce_scatter" : "stress_all_gather");
    if (plan.bad == Plan::Bad::kNone || what.find(expected) == std::string::npos) {
      give_up("rank %d: operation %lu: unexpected error: %s", rank_, operation_, what.c_str());
    }
    return Went::kError;
  }

  // What rank `of` gathers: pseudo-random words of operation, rank and tensor.
  void fill(unsigned char* to, size_t bytes, int of, size_t tensor) const {
    uint64_t state = operation_ << 32 | static_cast<uint64_t>(of) << 16 | tensor;
    for (size_t i = 0; i < bytes; i += 8) {
      state = (state + 0x9e3779b97f4a7c15) * 0xbf58476d1ce4e5b9;
      const uint64_t word = state ^ state >> 31;
      std::memcpy(to + i, &word, std::min<size_t>(8, bytes - i));
    }
  }

  void check(Tensor& tensor, size_t index) const {
    std::vector<unsigned char> expected(tensor.output.size(), kPoison);
    for (int r = 0; r < setting_.world; ++r) {
      fill(expected.data() + (tensor.shard(r) - tensor.output.data()), tensor.bytes, r, index);
    }
    compare(tensor, expected);
  }

  void untouched(std::vector<Tensor>& tensors) const {
    for (size_t t = 0; t < tensors.size(); ++t) {
      std::vector<unsigned char> expected(tensors[t].output.size(), kPoison);
      if (tensors[t].in_place) {
        fill(expected.data() + (tensors[t].input() - tensors[t].output.data()), tensors[t].bytes,
             rank_, t);
      }
      compare(tensors[t], expected);
    }
  }

  void compare(const Tensor& tensor, const std::vector<unsigned char>& expected) const {
    if (tensor.output == expected) return;
    const auto at = std::mismatch(expected.begin(), expected.end(), tensor.output.begin()).first;
    give_up("rank %d: operation %lu: wrong byte at %ld of an output of %zu bytes a rank", rank_,
            operation_, static_cast<long>(at - expected.begin()) - static_cast<long>(kGuard),
            tensor.bytes);
  }

  const Setting& setting_;
  const int rank_;
  pg_sdma::DirectTransport& transport_;
  std::minstd_rand own_;
  uint64_t operation_ = 0;
};

}  // namespace stress
