// What explore_schedules.cpp explores: the operations of a run, the memory that they work on, and a
// program as streams may run it.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "transport/schedule/copies.h"
#include "transport/schedule/late.h"
#include "transport/schedule/reduce.h"
#include "transport/schedule/staged.h"

namespace schedules {

using namespace pg_sdma;

constexpr int kOperations = 4;
constexpr size_t kSlotBytes = 24;
constexpr size_t kGuard = 16;
constexpr unsigned char kPoison = 0xA5;    // of memory that its rank has not come to yet
constexpr unsigned char kScribble = 0x5A;  // of memory that its rank has done with

struct Options {
  std::string schedule;
  int world = 2;
  uint64_t slots = 8;
  unsigned seed = 1;
  std::string broken;

  bool sums() const { return schedule == "sums" || schedule == "thread-sums"; }
  // Whether agreeing has shown every rank ready.
  bool on_thread() const { return schedule == "thread" || schedule == "thread-sums"; }
};

inline uint64_t steps = 0;
inline uint64_t blocked = 0;

inline std::minstd_rand random_of(unsigned seed, unsigned other) {
  std::minstd_rand random(seed * 7919 + other * 104729 + 1);
  random.discard(3);
  return random;
}

// The byte at `i` of what rank `from` has for rank `to`; of an all-gather for all.
inline unsigned char byte(int operation, size_t tensor, int from, int to, size_t i) {
  const auto salt = static_cast<size_t>(operation) * 59 + tensor * 17;
  return static_cast<unsigned char>((i * 131 + salt + i / 256) * 7 +
                                    static_cast<size_t>(from) * 101 + static_cast<size_t>(to) * 29);
}

inline unsigned char then(unsigned char sum, unsigned char next) {
  return static_cast<unsigned char>(31 * sum + next);
}

// One operation of the run, equal on all ranks.
struct Shape {
  std::vector<size_t> sizes;  // of a rank's block of each tensor
  std::vector<int> arrival;   // the ranks in the order in which they came
};

inline Shape shape_of(const Options& options, int operation) {
  std::minstd_rand random = random_of(options.seed, static_cast<unsigned>(operation));
  Shape shape;
  shape.sizes.resize(1 + random() % 3);
  for (size_t& size : shape.sizes) {
    size = random() % (random() % 2 == 0 ? 30 : 400);
    if (options.sums()) size = size / kMostElement * kMostElement;
  }
  shape.arrival.resize(static_cast<size_t>(options.world));
  std::iota(shape.arrival.begin(), shape.arrival.end(), 0);
  std::shuffle(shape.arrival.begin(), shape.arrival.end(), random);
  return shape;
}

// What one rank has of one tensor of one operation, between bytes that nobody may touch.
struct Tensor {
  Tensor(size_t in, size_t out)
      : input(in + 2 * kGuard, kPoison), output(out + 2 * kGuard, kPoison) {}
  unsigned char* in() { return input.data() + kGuard; }
  unsigned char* out() { return output.data() + kGuard; }
  std::vector<unsigned char> input;
  std::vector<unsigned char> output;
};

class ByteReducer final : public Reducer {
 public:
  ByteReducer(int rank, int world, int landings, size_t room)
      : rank_(rank),
        world_(world),
        landings_(landings),
        room_(room),
        memory_(static_cast<size_t>(landings * world) * room, kPoison) {}
  int landings() const override { return landings_; }
  size_t room() const override { return room_; }
  void* landing(int which, int peer) override {
    return memory_.data() + static_cast<size_t>(which * world_ + peer) * room_;
  }
  Launch launch(const Share& share, size_t offset, size_t bytes, int which, size_t at) override {
    Launch launch;
    launch.call = [this, &share, offset, bytes, which, at] {
      for (size_t i = 0; i < bytes; ++i) {
        unsigned char sum = 0;
        for (int r = 0; r < world_; ++r) {
          const auto* from = static_cast<const unsigned char*>(
              r == rank_ ? share.slices[static_cast<size_t>(r)] : landing(which, r));
          sum = then(sum, from[(r == rank_ ? offset : at) + i]);
        }
        static_cast<unsigned char*>(share.output)[offset + i] = sum;
      }
      // Whoever has it next must not find it by luck.
      for (int r = 0; r < world_; ++r) {
        std::memset(static_cast<char*>(landing(which, r)) + at, kPoison, bytes);
      }
    };
    return launch;
  }

 private:
  const int rank_;
  const int world_;
  const int landings_;
  const size_t room_;
  std::vector<unsigned char> memory_;
};

// A program on streams: which of its steps have run, and which may be next (engine/engine.h).
class Running {
 public:
  explicit Running(Program program) : program_(std::move(program)), done_(program_.size()) {
    after_.resize(program_.size());
    std::vector<size_t> since;            // on tracks above 0, since the last step of track 0
    std::map<uint32_t, size_t> of_track;  // the last step of each track, since then
    std::map<uint64_t, size_t> marks;
    size_t main = kNone, beside = kNone, fork = kNone, launch = kNone;
    for (size_t i = 0; i < program_.size(); ++i) {
      const Step& step = program_[i];
      if (step.kind == Step::Kind::kLaunch || step.kind == Step::Kind::kMark) {
        behind(i, launch);
        behind(i, fork);
        launch = i;
        if (step.kind == Step::Kind::kMark) marks[step.value] = i;
      } else if (step.track == Step::kBeside) {
        behind(i, beside);
        behind(i, main);
        beside = i;
      } else if (step.track > 0) {
        behind(i, of_track.count(step.track) > 0 ? of_track[step.track] : main);
        of_track[step.track] = i;
        since.push_back(i);
      } else {
        behind(i, main);
        for (const size_t before : since) behind(i, before);
        since.clear();
        of_track.clear();
        if (step.kind == Step::Kind::kJoin) behind(i, marks.at(step.value));
        if (step.kind == Step::Kind::kFork) fork = i;
        main = i;
      }
    }
  }

  bool over() const { return left_ == 0; }

  // Runs a step that may be next. False where all of them have to wait.
  bool step(std::minstd_rand& random) {
    std::vector<size_t> next;
    for (size_t i = 0; i < program_.size(); ++i) {
      if (done_[i]) continue;
      const bool may = std::all_of(after_[i].begin(), after_[i].end(),
                                   [this](size_t before) { return done_[before]; });
      if (may) next.push_back(i);
    }
    std::shuffle(next.begin(), next.end(), random);
    for (const size_t i : next) {
      ++steps;
      if (!run(program_[i])) {
        ++blocked;
        continue;
      }
      done_[i] = true;
      --left_;
      return true;
    }
    return false;
  }

 private:
  static constexpr size_t kNone = SIZE_MAX;

  void behind(size_t i, size_t before) {
    if (before != kNone) after_[i].push_back(before);
  }

  static bool run(const Step& step) {
    switch (step.kind) {
      case Step::Kind::kWait:
        return step.counter->load() >= step.value;
      case Step::Kind::kWrite:
        step.counter->store(step.value);
        break;
      case Step::Kind::kCopy:
        std::memcpy(step.destination, reinterpret_cast<const void*>(step.source), step.bytes);
        break;
      case Step::Kind::kLaunch:
        step.launch->call();
        break;
      default:
        break;
    }
    return true;
  }

  Program program_;
  std::vector<bool> done_;
  std::vector<std::vector<size_t>> after_;
  size_t left_ = program_.size();
};

}  // namespace schedules
