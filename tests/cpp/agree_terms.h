// What the explorer of the agreement speaks of: bounds, kinds of calls, records, moves.
#pragma once

#include <cstdint>
#include <string>

#include "transport/agreement/protocol.h"

namespace explore {

using pg_sdma::CallState;
using pg_sdma::CallSummary;
using pg_sdma::Outcome;
using pg_sdma::Verdict;

constexpr int kMostOperations = 5;
constexpr int kMostSlots = 3;

struct Bounds {
  int operations = 2;  // that every rank runs
  int ring = 2;
  int opens = 0;  // whether exports are opened
  // Records that are not good and openings that are refused, in any places, at most so many.
  int faults = 1;
};

// What a rank's call of one operation is like.
enum class Kind : uint8_t { kGood, kUnshareable, kMismatching, kInvalid };
constexpr int kKinds = 4;

inline CallSummary summary(Kind kind) {
  switch (kind) {
    case Kind::kUnshareable:
      return {CallState::kUnshareable, 1};
    case Kind::kMismatching:
      return {CallState::kShareable, 2};
    case Kind::kInvalid:
      return {CallState::kInvalid, 0};
    default:
      return {CallState::kShareable, 1};
  }
}

inline bool contradict(Kind one, Kind other) {
  return one == Kind::kInvalid || other == Kind::kInvalid ||
         (one == Kind::kMismatching) != (other == Kind::kMismatching);
}

inline std::string text(const Verdict& verdict) {
  static const char* const names[] = {"none", "direct", "inner", "late", "error", "deferred"};
  return std::to_string(verdict.number) + " " + names[static_cast<int>(verdict.outcome)];
}

// The private copy that a rank took of a peer's record: of the operation it runs, or torn.
struct Copy {
  enum : uint8_t { kNone, kIntact, kTorn } state = kNone;
  Kind kind = Kind::kGood;
};

// `number` is what readers look for, `payload` the operation whose payload lies there.
struct Record {
  uint8_t number = 0;
  uint8_t payload = 0;
  Kind kind = Kind::kGood;
};

// What a rank does next: a step of its machine, or the end of its patience. `choice` settles what
// is not up to the machine: the kind of a call, whether an opening is refused, what a torn copy
// says.
struct Move {
  uint8_t rank = 0;
  bool give_up = false;
  uint8_t choice = 0;
};

struct Effect {
  bool moved = false;  // otherwise the rank is blocked, or done for good
  bool blocked = false;
  int choices = 1;  // how many the move had
  const char* violation = nullptr;
};

}  // namespace explore
