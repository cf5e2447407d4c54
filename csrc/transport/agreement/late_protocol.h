// How the ranks of a group carry operation k when one of them was late for it: each enqueues its
// part when it comes, and no host waits for another. Of every two ranks, the one that comes later
// copies both ways; whoever came before waits for that on its device. As in agree.h, a state
// machine that takes one shared-memory access a step, so that a test can explore every interleaving
// (tests/cpp/explore_arrival.cpp).
//
// One word a slot holds (k, the ranks that have arrived) and is only ever set by compare-and-swap:
// who joins finds there all that came before, whose records were written before they joined.
//
// Slots are used again, k after k - R, once every rank has caught up with k - R: has read the
// records of those before it. A rank whose patience ends looks whether that is so, and else has the
// operation go to the inner.
#pragma once

#include <cstdint>

#include "transport/agreement/protocol.h"

namespace pg_sdma {

// (number, bits of the ranks that have arrived) in one word.
struct Arrived {
  static constexpr int kMostRanks = 16;

  uint64_t number = 0;
  uint32_t ranks = 0;

  uint64_t pack() const { return number << kMostRanks | ranks; }
  static Arrived unpack(uint64_t word) {
    return {word >> kMostRanks, static_cast<uint32_t>(word & ((1U << kMostRanks) - 1))};
  }
};

// The rules, for the explorer as in agree.h.
struct AllArrivalRules {
  static constexpr bool keep_slot_until_caught_up = true;
  static constexpr bool write_record_before_joining = true;
  static constexpr bool lapped_ranks_look = true;
  static constexpr bool unreachable_ranks_come_last = true;
  static constexpr bool invalid_calls_do_not_join = true;
};

// Page gives single shared-memory accesses:
//   uint64_t arrived(slot); bool swap_arrived(slot, expected, desired);
//   void write_arrival(rank, slot); CallSummary copy_arrival(rank, slot);
//   uint64_t caught_up(rank); void catch_up(rank, number);
template <class Page, class Rules = AllArrivalRules>
class LateProtocol {
 public:
  enum class Progress : uint8_t {
    kMoved,    // call step() again
    kBlocked,  // nothing changes until waiting_for() acts
    kDone      // turn() says what to do
  };
  enum class Turn : uint8_t {
    kNone,
    kInner,  // as all ranks
    kJoin,   // copy to and from those that has_earlier() tells, and wait for the others
    kBroken  // the own call is invalid, or contradicts that of culprit(), and ranks count on it
  };

  LateProtocol(int rank, int world, uint64_t ring) : rank_(rank), world_(world), ring_(ring) {}

  // Whether there is a slot for operation `number`. Once there is, it stays free for that one.
  bool has_room(Page& page, uint64_t number) const {
    const uint64_t occupant = Arrived::unpack(page.arrived(number % ring_)).number;
    for (int rank = 0; rank < world_ && Rules::keep_slot_until_caught_up; ++rank) {
      if (page.caught_up(rank) < occupant) return false;
    }
    return true;
  }

  // Operation `number`, with the own record's summary. Either the ranks have agreed to carry it in
  // order of arrival, or this rank was `lapped`: so late that the agreement's slot has gone to
  // another operation, and only what is here tells whether they have.
  void start(uint64_t number, CallSummary own, bool lapped) {
    number_ = number;
    slot_ = number % ring_;
    own_ = own;
    lapped_ = lapped;
    joined_ = false;
    earlier_ = 0;
    culprit_ = rank_;
    turn_ = Turn::kNone;
    to(State::kLook);
  }

  Progress step(Page& page) {
    switch (state_) {
      case State::kLook:
        return look(page);
      case State::kWrite:
        page.write_arrival(rank_, slot_);
        return to(joined_ ? State::kRead : State::kJoin);
      case State::kJoin:
        return join(page);
      case State::kRead:
        return read(page);
      case State::kCatchUp:
        page.catch_up(rank_, number_);
        return end(culprit_ == rank_ ? Turn::kJoin : Turn::kBroken);
      case State::kDone:
        break;
    }
    return Progress::kDone;
  }

  bool done() const { return state_ == State::kDone; }
  Turn turn() const { return turn_; }
  uint64_t number() const { return number_; }
  bool has_earlier(int rank) const { return (earlier_ >> rank & 1) != 0; }
  // Whose call the own one contradicts; the own rank where that is invalid by itself.
  int culprit() const { return culprit_; }
  // The rank whose act this one waits for, while step() says kBlocked.
  int waiting_for() const { return cursor_; }

 private:
  enum class State : uint8_t { kLook, kWrite, kJoin, kRead, kCatchUp, kDone };

  Progress to(State next) {
    state_ = next;
    cursor_ = 0;
    return Progress::kMoved;
  }
  Progress end(Turn turn) {
    turn_ = turn;
    return to(State::kDone);
  }

  uint32_t own_bit() const { return uint32_t{1} << rank_; }
  // The ranks that have arrived, as the word was when last looked at.
  uint32_t before() const {
    const Arrived seen = Arrived::unpack(word_);
    return seen.number == number_ ? seen.ranks : 0;
  }

  Progress look(Page& page) {
    word_ = page.arrived(slot_);
    if (lapped_ && (before() == 0 || !Rules::lapped_ranks_look)) return end(Turn::kInner);
    if (own_.state == CallState::kInvalid && Rules::invalid_calls_do_not_join) {
      return end(Turn::kBroken);
    }
    // Nobody who comes later could reach its memory.
    if (own_.state == CallState::kUnshareable && Rules::unreachable_ranks_come_last) {
      for (cursor_ = 0; cursor_ < world_; ++cursor_) {
        if (((before() | own_bit()) >> cursor_ & 1) == 0) return Progress::kBlocked;
      }
    }
    return to(Rules::write_record_before_joining ? State::kWrite : State::kJoin);
  }

  Progress join(Page& page) {
    if (!page.swap_arrived(slot_, word_, Arrived{number_, before() | own_bit()}.pack())) {
      return to(State::kLook);
    }
    earlier_ = before();
    joined_ = true;
    return to(Rules::write_record_before_joining ? State::kRead : State::kWrite);
  }

  Progress read(Page& page) {
    while (cursor_ < world_ && !has_earlier(cursor_)) ++cursor_;
    if (cursor_ == world_) return to(State::kCatchUp);
    const CallSummary theirs = page.copy_arrival(cursor_, slot_);
    if (culprit_ == rank_ && theirs.signature != own_.signature) culprit_ = cursor_;
    ++cursor_;
    return Progress::kMoved;
  }

  int rank_;
  int world_;
  uint64_t ring_;

  State state_ = State::kDone;
  Turn turn_ = Turn::kNone;
  uint64_t number_ = 0;
  uint64_t slot_ = 0;
  uint64_t word_ = 0;  // of the slot, when last looked at
  int cursor_ = 0;     // the rank being looked at
  bool lapped_ = false;
  bool joined_ = false;
  CallSummary own_{};
  uint32_t earlier_ = 0;
  int culprit_ = 0;
};

}  // namespace pg_sdma
