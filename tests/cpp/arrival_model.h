// A group that runs the real LateProtocol over a page of plain values, for explore_arrival.cpp:
// what one rank can do next, and what must never come of it. What the ranks have agreed on is
// given: the first rank that comes to an operation finds room for it or not, and a rank that is a
// ring behind another may have been lapped.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <type_traits>

#include "agree_terms.h"
#include "transport/agreement/late_protocol.h"

namespace explore {

template <int World, class Rules>
struct ArrivalGroup {
  class View;
  using Machine = pg_sdma::LateProtocol<View, Rules>;
  using Progress = typename Machine::Progress;
  using Turn = typename Machine::Turn;

  struct Rank {
    Machine machine{0, World, 1};
    uint8_t operation = 0;  // the one it runs, or ran last
    Kind kind = Kind::kGood;
    bool running = false;

    bool inside() const { return running; }
  };

  struct State {
    std::array<uint64_t, kMostSlots> words{};
    std::array<std::array<Record, kMostSlots>, World> records{};
    std::array<uint8_t, World> caught_up{};
    std::array<Rank, World> ranks{};
    std::array<Outcome, kMostOperations + 1> agreed{};  // kNone: nobody has come yet
    // Of each operation, whom each rank found there before it, a bit each, and who has joined.
    std::array<std::array<uint8_t, World>, kMostOperations + 1> earlier{};
    std::array<uint8_t, kMostOperations + 1> joined{};
    uint8_t faults = 0;
    bool broken = false;  // a rank whose call does not fit has said so, and ended the group
  };
  static_assert(std::is_trivially_copyable_v<State>);

  class View {
   public:
    View(State& state, int rank, std::string* log) : state_(state), self_(rank), log_(log) {}

    uint64_t arrived(uint64_t slot) {
      note("reads who has arrived: " + text(state_.words[slot]));
      return state_.words[slot];
    }
    bool swap_arrived(uint64_t slot, uint64_t expected, uint64_t desired) {
      const bool first = state_.words[slot] == expected;
      note("joins as " + text(desired) + (first ? "" : ": too late"));
      if (first) state_.words[slot] = desired;
      return first;
    }
    void write_arrival(int rank, uint64_t slot) {
      note("writes its record");
      state_.records[rank][slot].payload = state_.ranks[rank].operation;
      state_.records[rank][slot].kind = state_.ranks[rank].kind;
    }
    CallSummary copy_arrival(int rank, uint64_t slot) {
      note("copies record of rank " + std::to_string(rank));
      const Record& record = state_.records[rank][slot];
      if (record.payload != state_.ranks[self_].operation) {
        violation = "reads a record of another operation";
      } else if (summary(record.kind).state != CallState::kShareable) {
        violation = "is to copy from a rank that nobody can reach";
      }
      return summary(record.kind);
    }
    uint64_t caught_up(int rank) { return state_.caught_up[rank]; }
    void catch_up(int rank, uint64_t number) {
      note("catches up");
      state_.caught_up[rank] = static_cast<uint8_t>(number);
    }
    void note(const std::string& what) {
      if (log_ != nullptr) *log_ += (log_->empty() ? "" : ", ") + what;
    }

    const char* violation = nullptr;

   private:
    static std::string text(uint64_t word) {
      const auto seen = pg_sdma::Arrived::unpack(word);
      return std::to_string(seen.number) + " ranks " + std::to_string(seen.ranks);
    }

    State& state_;
    const int self_;
    std::string* log_;
  };

  static State initial(const Bounds& bounds) {
    State state;
    state.faults = static_cast<uint8_t>(bounds.faults);
    return state;
  }

  static bool finished(const State& state, const Bounds& bounds) {
    if (state.broken) return true;
    for (const Rank& rank : state.ranks) {
      if (rank.inside() || rank.operation < bounds.operations) return false;
    }
    return true;
  }

  // A move's choice: what kind of call it is, and above that whether the rank was lapped.
  static Effect apply(State& state, const Bounds& bounds, const Move& move,
                      std::string* log = nullptr) {
    Rank& rank = state.ranks[move.rank];
    View view(state, move.rank, log);
    Effect effect;
    if (state.broken || move.give_up) return effect;
    if (!rank.inside()) {
      if (rank.operation == bounds.operations) return effect;
      const bool lapped = move.choice >= kKinds;
      rank.kind = static_cast<Kind>(move.choice % kKinds);
      if (rank.kind != Kind::kGood && state.faults == 0) {
        effect.choices = 2 * kKinds;
        return effect;
      }
      if (rank.kind != Kind::kGood) --state.faults;
      effect = start(state, bounds, move.rank, lapped, view);
      effect.choices = 2 * kKinds;
      return effect;
    }
    const Progress progress = rank.machine.step(view);
    effect.moved = progress != Progress::kBlocked;
    effect.violation = view.violation;
    if (rank.machine.done() && !effect.violation) {
      effect.violation = finish(state, bounds, move.rank);
    }
    return effect;
  }

 private:
  static Effect start(State& state, const Bounds& bounds, int index, bool lapped, View& view) {
    Rank& rank = state.ranks[index];
    Effect effect;
    const uint8_t operation = rank.operation + 1;
    Outcome& agreed = state.agreed[operation];
    if (lapped && !was_overtaken(state, bounds, operation)) return effect;
    effect.moved = true;
    rank.operation = operation;
    rank.machine = Machine(index, World, static_cast<uint64_t>(bounds.ring));
    view.note("comes to operation " + std::to_string(operation) + (lapped ? ", lapped" : ""));
    if (agreed == Outcome::kNone) {
      const bool room = rank.machine.has_room(view, operation);
      agreed = room && rank.kind == Kind::kGood ? Outcome::kDeferred : Outcome::kLate;
    }
    if (!lapped && agreed == Outcome::kLate) return effect;
    rank.running = true;
    rank.machine.start(operation, summary(rank.kind), lapped);
    return effect;
  }

  // Whether a peer may have taken the agreement's slot of `operation` for another.
  static bool was_overtaken(const State& state, const Bounds& bounds, int operation) {
    for (const Rank& rank : state.ranks) {
      if (rank.operation >= operation + bounds.ring) return true;
    }
    return false;
  }

  static const char* finish(State& state, const Bounds&, int index) {
    Rank& rank = state.ranks[index];
    rank.running = false;
    const uint8_t k = rank.operation;
    const bool deferred = state.agreed[k] == Outcome::kDeferred;
    const Machine machine = rank.machine;
    rank.machine = Machine(index, World, 1);
    switch (machine.turn()) {
      case Turn::kInner:
        return deferred ? "takes the inner, alone" : nullptr;
      case Turn::kBroken:
        state.broken = true;
        return rank.kind == Kind::kGood && state.ranks[machine.culprit()].kind == Kind::kGood &&
                       state.ranks[machine.culprit()].operation == k
                   ? "ends the group for no reason"
                   : nullptr;
      default:
        break;
    }
    if (!deferred) return "goes direct, alone";
    if (rank.kind == Kind::kInvalid) return "goes direct with bad arguments";
    for (int peer = 0; peer < World; ++peer) {
      if (machine.has_earlier(peer)) state.earlier[k][index] |= 1 << peer;
    }
    for (int peer = 0; peer < World; ++peer) {
      if ((state.joined[k] >> peer & 1) == 0) continue;
      const bool here = (state.earlier[k][index] >> peer & 1) != 0;
      const bool there = (state.earlier[k][peer] >> index & 1) != 0;
      if (here == there)
        return here ? "two ranks copy the same" : "two ranks leave it to each other";
    }
    state.joined[k] |= 1 << index;
    return nullptr;
  }
};

}  // namespace explore
