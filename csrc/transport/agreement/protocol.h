// How the ranks of a group agree on the route of operation k: a state machine over the control page
// that takes one shared-memory access a step, so that a test can explore every interleaving of the
// very code that runs in production (tests/cpp/explore_agree.cpp).
//
// A rank publishes a record of its call, reads everybody's, opens what it must, acknowledges, and
// reads everybody's acknowledgement. One word a slot holds (k, verdict) and is only ever set by
// compare-and-swap from an older number: the first writer decides for all.
//   direct  every rank can reach all the others' tensors: it has acknowledged k, or, where nothing
//           has to be opened, it has published a record that says so
//   inner   a rank cannot share its memory, or the patience of a rank ended first (late)
//   deferred  late, but the ranks go direct in order of arrival (arrival.h): where the records that
//           are there all say that memory can be shared
//   error   a record is invalid or two contradict each other: every rank raises
//
// Slots are used again, k after k - R. A direct or error verdict and its records stay until every
// rank has consumed them. An inner slot may be lapped: its ranks need nothing from each other, so a
// rank that finds a newer number in its slot knows that it is late and takes the inner; or what was
// deferred, whose ranks find each other elsewhere.
#pragma once

#include <cstdint>

namespace pg_sdma {

enum class Outcome : uint8_t {
  kNone = 0,
  kDirect = 1,
  kInner = 2,
  kLate = 3,
  kError = 4,
  kDeferred = 5
};

// (number, outcome, rank that caused it) in one word, ordered by number.
struct Verdict {
  uint64_t number = 0;
  Outcome outcome = Outcome::kNone;
  int rank = 0;

  uint64_t pack() const {
    return number << 20 | static_cast<uint64_t>(outcome) << 16 | static_cast<uint64_t>(rank);
  }
  static Verdict unpack(uint64_t word) {
    return {word >> 20, static_cast<Outcome>(word >> 16 & 0xf), static_cast<int>(word & 0xffff)};
  }
};

// What a record says of the call, as far as agreeing needs it.
enum class CallState : uint8_t { kShareable, kUnshareable, kInvalid };
struct CallSummary {
  CallState state = CallState::kShareable;
  uint64_t signature = 0;  // equal on all ranks when the calls match
};

// The rules of the protocol. The explorer switches each off in turn and shows what then goes wrong;
// production code uses the defaults, which cost nothing.
struct AllRules {
  static constexpr bool take_verdict_found_on_entry = true;
  static constexpr bool keep_direct_slot_until_consumed = true;
  static constexpr bool keep_error_slot_until_consumed = true;
  static constexpr bool lap_inner_slots = true;
  static constexpr bool hide_record_before_writing = true;
  static constexpr bool recheck_record_after_copy = true;
  static constexpr bool check_every_record = true;
  static constexpr bool error_outweighs_unshareable = true;
  static constexpr bool error_outweighs_lateness = true;
  static constexpr bool acknowledge_after_opening = true;
  static constexpr bool direct_needs_every_acknowledgement = true;
  static constexpr bool first_writer_wins = true;
  static constexpr bool newer_number_means_late = true;
  static constexpr bool records_before_consuming = true;
  static constexpr bool patience_ends = true;
};

// Page gives single shared-memory accesses:
//   uint64_t verdict(slot); bool swap_verdict(slot, expected, desired);
//   uint64_t record_number(rank, slot); CallSummary copy_record(rank, slot);
//   void hide_record(rank, slot); void write_record(rank, slot);
//   void show_record(rank, slot, number);
//   uint64_t acknowledged(rank); void acknowledge(rank, number);
//   uint64_t consumed(rank); void consume(rank, number);
template <class Page, class Rules = AllRules>
class AgreementProtocol {
 public:
  enum class Progress : uint8_t {
    kMoved,    // call step() again
    kBlocked,  // nothing changes until waiting_for() acts; step() again after it has, or give_up()
    kOpen,     // open the exports of all records, then call opened()
    kDone      // verdict() holds the outcome
  };

  // `opens`: whether peers' memory must be opened, and opening it may be refused. Otherwise the
  // records alone decide, and there are no acknowledgements.
  AgreementProtocol(int rank, int world, uint64_t ring, bool opens)
      : rank_(rank), world_(world), ring_(ring), opens_(opens) {}

  // Starts operation `number` (1, 2, 3, ...) with the own record's summary. Page::write_record puts
  // the own record there once the slot is free.
  void start(uint64_t number, CallSummary own) {
    number_ = number;
    slot_ = number % ring_;
    own_ = own;
    have_records_ = false;
    verdict_ = Verdict{};
    lapped_ = false;
    trouble_ = Outcome::kNone;
    note(rank_, own);
    cursor_ = 0;
    state_ = State::kEnter;
  }

  Progress step(Page& page) {
    switch (state_) {
      case State::kEnter:
        return enter(page);
      case State::kAwaitConsumed:
        return await_consumed(page);
      case State::kHide:
        page.hide_record(rank_, slot_);
        return to(State::kWrite);
      case State::kWrite:
        page.write_record(rank_, slot_);
        return to(State::kShow);
      case State::kShow:
        page.show_record(rank_, slot_, number_);
        return to(State::kFindRecord);
      case State::kFindRecord:
        return find_record(page);
      case State::kCopyRecord:
        summary_ = page.copy_record(cursor_, slot_);
        return to(State::kCheckRecord);
      case State::kCheckRecord:
        return check_record(page);
      case State::kOpen:
        return Progress::kOpen;
      case State::kAcknowledge:
        page.acknowledge(rank_, number_);
        cursor_ = 0;
        return to(State::kReadAcknowledged);
      case State::kReadAcknowledged:
        return read_acknowledged(page);
      case State::kDecide:
        return decide(page);
      case State::kReadVerdict:
        return read_verdict(page);
      case State::kConsume:
        page.consume(rank_, number_);
        return to(State::kDone);
      case State::kDone:
        return Progress::kDone;
    }
    return Progress::kDone;
  }

  // After kOpen: whether every peer's export could be opened; otherwise the verdict is inner.
  void opened(bool ok) {
    if (ok || !Rules::acknowledge_after_opening) {
      state_ = State::kAcknowledge;
    } else {
      propose(Outcome::kInner, rank_);
    }
  }

  // Whether the wait, while step() says kBlocked, is one that patience ends. One for a slot that
  // peers have yet to consume is not: direct verdicts are consumed by ranks that are already inside
  // the operation, and an error must not be lost to a rank that comes late for it.
  bool may_give_up() const { return Rules::patience_ends && state_ != State::kAwaitConsumed; }

  // Ends this rank's patience, where it may. `defer`: whether there is room to defer the operation.
  void give_up(bool defer = false) {
    // A contradiction seen among the records that are there outweighs the missing ones.
    if (trouble_ == Outcome::kError && Rules::error_outweighs_lateness) {
      propose(Outcome::kError, trouble_rank_);
    } else {
      // Its own memory is what ranks that come later reach, and of two whose memory nobody reaches
      // none could copy.
      const bool reachable = trouble_ == Outcome::kNone;
      propose(defer && reachable ? Outcome::kDeferred : Outcome::kLate, cursor_);
    }
  }

  // Whether the wait is for a rank that has not made the call yet, as far as this one can see. One
  // that has will act soon.
  bool waits_for_record() const { return state_ == State::kFindRecord; }

  // The rank whose next act this one waits for, while step() says kBlocked.
  int waiting_for() const { return cursor_; }
  bool done() const { return state_ == State::kDone; }
  const Verdict& verdict() const { return verdict_; }
  // Whether the verdict is that of a rank so late that it found another operation in its slot.
  bool lapped() const { return lapped_; }
  uint64_t number() const { return number_; }

 private:
  enum class State : uint8_t {
    kEnter,
    kAwaitConsumed,
    kHide,
    kWrite,
    kShow,
    kFindRecord,
    kCopyRecord,
    kCheckRecord,
    kOpen,
    kAcknowledge,
    kReadAcknowledged,
    kDecide,
    kReadVerdict,
    kConsume,
    kDone
  };

  Progress to(State next) {
    state_ = next;
    return Progress::kMoved;
  }

  void propose(Outcome outcome, int rank) {
    proposal_ = {number_, outcome, rank};
    state_ = State::kDecide;
  }

  Progress enter(Page& page) {
    occupant_ = page.verdict(slot_);
    const Verdict seen = Verdict::unpack(occupant_);
    if (seen.number >= number_ && Rules::take_verdict_found_on_entry) return take(seen);
    cursor_ = 0;
    return needed(seen.outcome) ? to(State::kAwaitConsumed) : publish();
  }

  // Whether ranks that have yet to read a verdict, or the records behind it, must find them.
  static bool needed(Outcome outcome) {
    switch (outcome) {
      case Outcome::kDirect:
        return Rules::keep_direct_slot_until_consumed;
      case Outcome::kError:
        return Rules::keep_error_slot_until_consumed;
      case Outcome::kInner:
      case Outcome::kLate:
      case Outcome::kDeferred:
        return !Rules::lap_inner_slots;
      default:
        return false;
    }
  }

  Progress publish() {
    cursor_ = 0;
    return to(Rules::hide_record_before_writing ? State::kHide : State::kWrite);
  }

  Progress await_consumed(Page& page) {
    if (page.consumed(cursor_) < Verdict::unpack(occupant_).number) return Progress::kBlocked;
    return ++cursor_ == world_ ? publish() : Progress::kMoved;
  }

  Progress find_record(Page& page) {
    if (page.record_number(cursor_, slot_) == number_) return to(State::kCopyRecord);
    return or_verdict(page);
  }

  Progress check_record(Page& page) {
    if (Rules::recheck_record_after_copy && page.record_number(cursor_, slot_) != number_) {
      return to(State::kReadVerdict);  // its owner has left k, so k has a verdict
    }
    note(cursor_, summary_);
    if (++cursor_ < (Rules::check_every_record ? world_ : rank_ + 1)) return to(State::kFindRecord);
    have_records_ = true;
    cursor_ = 0;
    if (verdict_.outcome == Outcome::kDirect) return to(State::kConsume);
    if (trouble_ != Outcome::kNone) {
      propose(trouble_, trouble_rank_);
      return Progress::kMoved;
    }
    if (opens_) return to(State::kOpen);
    propose(Outcome::kDirect, rank_);
    return Progress::kMoved;
  }

  // An error outweighs memory that cannot be shared: a rank that raises cannot join the inner.
  void note(int rank, const CallSummary& summary) {
    const bool error = summary.state == CallState::kInvalid ||
                       (own_.state != CallState::kInvalid && summary.signature != own_.signature);
    const bool outweighs = Rules::error_outweighs_unshareable || trouble_ == Outcome::kNone;
    if (error && trouble_ != Outcome::kError && outweighs) {
      trouble_ = Outcome::kError;
      trouble_rank_ = rank;
    } else if (summary.state == CallState::kUnshareable && trouble_ == Outcome::kNone) {
      trouble_ = Outcome::kInner;
      trouble_rank_ = rank;
    }
  }

  Progress read_acknowledged(Page& page) {
    // Equality: a rank that has acknowledged a later number has left k, so k has a verdict.
    if (Rules::direct_needs_every_acknowledgement && page.acknowledged(cursor_) != number_) {
      return or_verdict(page);
    }
    if (++cursor_ < world_) return Progress::kMoved;
    propose(Outcome::kDirect, rank_);
    return Progress::kMoved;
  }

  Progress or_verdict(Page& page) {
    const Verdict seen = Verdict::unpack(page.verdict(slot_));
    return seen.number >= number_ ? take(seen) : Progress::kBlocked;
  }

  Progress decide(Page& page) {
    if (page.swap_verdict(slot_, occupant_, proposal_.pack()) || !Rules::first_writer_wins) {
      return take(proposal_);
    }
    return to(State::kReadVerdict);
  }

  Progress read_verdict(Page& page) { return take(Verdict::unpack(page.verdict(slot_))); }

  Progress take(const Verdict& seen) {
    verdict_ = seen;
    lapped_ = seen.number != number_;
    if (lapped_ && Rules::newer_number_means_late) {
      verdict_ = {number_, Outcome::kLate, rank_};
    }
    // Where nothing is opened a peer may decide before this rank has read the records that it is
    // about to use.
    if (verdict_.outcome == Outcome::kDirect && !have_records_ && Rules::records_before_consuming) {
      cursor_ = 0;
      return to(State::kFindRecord);
    }
    return to(State::kConsume);
  }

  int rank_;
  int world_;
  uint64_t ring_;
  bool opens_;

  State state_ = State::kDone;
  uint64_t number_ = 0;
  uint64_t slot_ = 0;
  uint64_t occupant_ = 0;  // the slot's word on entry: what a verdict of ours replaces
  int cursor_ = 0;         // the rank being looked at
  CallSummary own_{};
  CallSummary summary_{};
  bool have_records_ = false;
  Outcome trouble_ = Outcome::kNone;
  int trouble_rank_ = 0;
  Verdict proposal_{};
  Verdict verdict_{};
  bool lapped_ = false;
};

}  // namespace pg_sdma
