// A group that runs the real AgreementProtocol over a page of plain values, for explore_agree.cpp:
// what one rank can do next, and what must never come of it.
//
// The model's page does one access at a time, in one order for all ranks, as the control page's
// sequentially consistent words do. Payloads of records are the exception there and so here: who
// copies one while it is being written, or after it was replaced, gets any summary at all.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <type_traits>

#include "agree_terms.h"

namespace explore {

template <int World, class Rules>
struct Group {
  class View;
  using Machine = pg_sdma::AgreementProtocol<View, Rules>;
  using Progress = typename Machine::Progress;

  struct Rank {
    Machine machine{0, World, 1, false};
    uint8_t operation = 0;  // the one it runs, or ran last
    Kind kind = Kind::kGood;
    enum : uint8_t { kNot, kOpened, kRefused } opening = kNot;
    std::array<Copy, World> copies{};

    bool inside() const { return machine.number() != 0; }
  };

  // All there is to know of a moment. Trivially copyable, so that its bytes are its key.
  struct State {
    std::array<uint64_t, kMostSlots> verdicts{};
    std::array<std::array<Record, kMostSlots>, World> records{};
    std::array<uint8_t, World> acknowledged{};
    std::array<uint8_t, World> consumed{};
    std::array<Rank, World> ranks{};
    // How the first rank to finish an operation went on, until all have finished it.
    std::array<Outcome, kMostOperations + 1> went{};
    uint8_t faults = 0;
  };
  static_assert(std::is_trivially_copyable_v<State>);

  // The page as `rank`'s machine sees it, with what to check at each access.
  class View {
   public:
    View(State& state, const Bounds& bounds, int rank, int choice, std::string* log)
        : state_(state), bounds_(bounds), self_(rank), choice_(choice), log_(log) {}

    uint64_t verdict(uint64_t slot) {
      note("reads verdict: " + text(Verdict::unpack(state_.verdicts[slot])));
      return state_.verdicts[slot];
    }

    bool swap_verdict(uint64_t slot, uint64_t expected, uint64_t desired) {
      const Verdict verdict = Verdict::unpack(desired);
      const bool first = state_.verdicts[slot] == expected;
      note("proposes " + text(verdict) + (first ? ": decided" : ": too late"));
      if (!first) return false;
      // Only an error is asked which rank caused it: without the rest there are fewer states.
      state_.verdicts[slot] = verdict.outcome == Outcome::kError
                                  ? desired
                                  : Verdict{verdict.number, verdict.outcome, 0}.pack();
      violation = decided_wrongly(verdict, slot);
      ring(verdict.outcome == Outcome::kDirect ? 0 : (1 << World) - 1);
      return true;
    }

    uint64_t record_number(int rank, uint64_t slot) {
      note("reads number of record of rank " + std::to_string(rank) + ": " +
           std::to_string(state_.records[rank][slot].number));
      return state_.records[rank][slot].number;
    }

    CallSummary copy_record(int rank, uint64_t slot) {
      const Record& record = state_.records[rank][slot];
      const auto number = static_cast<uint8_t>(self().machine.number());
      const bool intact = record.number == number && record.payload == number;
      if (!intact) choices = kKinds;
      const Kind kind = intact ? record.kind : static_cast<Kind>(choice_);
      self().copies[rank] = {intact ? Copy::kIntact : Copy::kTorn, kind};
      note("copies record of rank " + std::to_string(rank) + (intact ? "" : ", torn"));
      return summary(kind);
    }

    void hide_record(int rank, uint64_t slot) {
      note("hides its record");
      state_.records[rank][slot].number = 0;
    }

    void write_record(int rank, uint64_t slot) {
      note("writes its record");
      Record& record = state_.records[rank][slot];
      record.payload = self().operation;
      record.kind = self().kind;
    }

    void show_record(int rank, uint64_t slot, uint64_t number) {
      note("shows its record");
      state_.records[rank][slot].number = static_cast<uint8_t>(number);
      ring(1 << rank);
    }

    uint64_t acknowledged(int rank) {
      note("reads acknowledged of rank " + std::to_string(rank) + ": " +
           std::to_string(state_.acknowledged[rank]));
      return state_.acknowledged[rank];
    }

    void acknowledge(int rank, uint64_t number) {
      note("acknowledges");
      state_.acknowledged[rank] = static_cast<uint8_t>(number);
      ring(1 << rank);
    }

    uint64_t consumed(int rank) {
      note("reads consumed of rank " + std::to_string(rank) + ": " +
           std::to_string(state_.consumed[rank]));
      return state_.consumed[rank];
    }

    void consume(int rank, uint64_t number) {
      note("consumes");
      state_.consumed[rank] = static_cast<uint8_t>(number);
      ring(1 << rank);
    }

    void note(const std::string& what) {
      if (log_ != nullptr) *log_ += (log_->empty() ? "" : ", ") + what;
    }

    int choices = 1;
    const char* violation = nullptr;
    bool wakes = false;  // whether the move did what somebody may be asleep for
    int rang = 0;        // the ranks whose bells it then rang

   private:
    Rank& self() { return state_.ranks[self_]; }

    void ring(int ranks) {
      wakes = true;
      rang |= ranks;
    }

    // A verdict must have its reason. As long as there is none every rank is inside the operation
    // or before it, so the records on the page are the calls.
    const char* decided_wrongly(const Verdict& verdict, uint64_t slot) {
      bool all_shown = true, contradiction = false, unshareable = false, refused = false;
      bool all_opened = true;
      for (int r = 0; r < World; ++r) {
        const Record& record = state_.records[r][slot];
        if (record.number != verdict.number) {
          all_shown = false;
          continue;
        }
        unshareable |= record.kind == Kind::kUnshareable;
        refused |= state_.ranks[r].opening == Rank::kRefused;
        all_opened &= !bounds_.opens || state_.ranks[r].opening == Rank::kOpened;
        for (int p = 0; p <= r; ++p) {
          const Record& other = state_.records[p][slot];
          contradiction |= other.number == verdict.number && contradict(record.kind, other.kind);
        }
      }
      switch (verdict.outcome) {
        case Outcome::kDirect:
          if (!all_shown || contradiction) return "direct over calls that do not match";
          if (unshareable || !all_opened)
            return "direct over memory that not every rank has opened";
          return nullptr;
        case Outcome::kInner:
          if (!all_shown || contradiction) return "an error hidden behind memory not shared";
          return unshareable || refused ? nullptr : "inner for no reason";
        case Outcome::kDeferred:
          if (self().kind == Kind::kUnshareable) return "deferred by a rank that nobody can reach";
          for (const Copy& copy : self().copies) {
            if (copy.state == Copy::kIntact && copy.kind == Kind::kUnshareable) {
              return "deferred for a rank that is known to be beyond reach";
            }
          }
          [[fallthrough]];
        case Outcome::kLate:
          for (const Copy& copy : self().copies) {
            if (copy.state == Copy::kIntact && contradict(copy.kind, self().kind)) {
              return "an error that the rank has seen hidden behind lateness";
            }
          }
          return self().kind == Kind::kInvalid ? "own bad arguments hidden behind lateness"
                                               : nullptr;
        default:
          return contradiction ? nullptr : "error for no reason";
      }
    }

    State& state_;
    const Bounds& bounds_;
    const int self_;
    const int choice_;
    std::string* log_;
  };

  static State initial(const Bounds& bounds) {
    State state;
    for (int r = 0; r < World; ++r) state.ranks[r].machine = fresh(r, bounds);
    state.faults = static_cast<uint8_t>(bounds.faults);
    return state;
  }

  static bool finished(const State& state, const Bounds& bounds) {
    for (const Rank& rank : state.ranks) {
      if (rank.inside() || rank.operation < bounds.operations) return false;
    }
    return true;
  }

  // Makes the move, as the loop of DirectTransport::agree does. `state` is spoilt where the effect
  // says that the rank has not moved.
  static Effect apply(State& state, const Bounds& bounds, const Move& move,
                      std::string* log = nullptr) {
    const State before = state;
    Rank& rank = state.ranks[move.rank];
    View view(state, bounds, move.rank, move.choice, log);
    Effect effect;
    if (!rank.inside()) {
      if (rank.operation == bounds.operations) return effect;
      start(state, move, view);
      if (state.faults > 0 || move.choice > 0) effect.choices = kKinds;
      if (move.choice > 0) --state.faults;
    } else if (rank.machine.verdict().outcome == Outcome::kError &&
               !explained(state, bounds, move.rank)) {
      effect.violation = "an error whose records are gone before this rank has read them";
      return effect;
    }
    const Progress progress = rank.machine.step(view);
    effect.moved = true;
    effect.violation = view.violation;
    if (view.choices > 1) effect.choices = view.choices;
    if (view.wakes && !effect.violation) effect.violation = slept_through(before, state, view.rang);
    if (progress == Progress::kBlocked) {
      effect.blocked = true;
      effect.moved = move.give_up && rank.machine.may_give_up();
      // Whether there is room to defer is for explore_arrival.cpp: here one rank always finds some.
      if (effect.moved) rank.machine.give_up(move.rank == 0);
      view.note(effect.moved ? "gives up" : "is blocked");
      if (!effect.moved) effect.violation = waits_wrongly(state, bounds, move.rank);
    } else if (progress == Progress::kOpen) {
      effect.choices = state.faults > 0 || move.choice > 0 ? 2 : 1;
      if (move.choice > 0) --state.faults;
      rank.opening = move.choice > 0 ? Rank::kRefused : Rank::kOpened;
      view.note(move.choice > 0 ? "cannot open" : "opens");
      if (!copies_intact(rank)) effect.violation = "opens without intact records of all ranks";
      rank.machine.opened(move.choice == 0);
    }
    if (rank.machine.done() && !effect.violation)
      effect.violation = finish(state, bounds, move.rank);
    return effect;
  }

 private:
  static Machine fresh(int rank, const Bounds& bounds) {
    return Machine(rank, World, static_cast<uint64_t>(bounds.ring), bounds.opens);
  }

  static void start(State& state, const Move& move, View& view) {
    Rank& rank = state.ranks[move.rank];
    rank.kind = static_cast<Kind>(move.choice);
    rank.machine.start(++rank.operation, summary(rank.kind));
    static const char* const names[] = {"good", "unshareable", "mismatching", "invalid"};
    view.note("starts operation " + std::to_string(rank.operation) + ", " + names[move.choice]);
  }

  static bool copies_intact(const Rank& rank) {
    for (const Copy& copy : rank.copies) {
      if (copy.state != Copy::kIntact) return false;
    }
    return true;
  }

  // A rank that could not go on before a move, and can after it, is asleep until it hears the bell
  // of the rank it waits for.
  static const char* slept_through(const State& before, const State& after, int rang) {
    for (int r = 0; r < World; ++r) {
      const Machine& machine = before.ranks[r].machine;
      if ((rang >> machine.waiting_for() & 1) != 0 || !blocked(before, r)) continue;
      if (!blocked(after, r)) return "a rank sleeps through what it waits for";
    }
    return nullptr;
  }

  static bool blocked(State state, int rank) {
    static const Bounds bounds;
    View view(state, bounds, rank, 0, nullptr);
    return state.ranks[rank].inside() && state.ranks[rank].machine.step(view) == Progress::kBlocked;
  }

  // Whether the page shows why `rank` is about to raise.
  static bool explained(const State& state, const Bounds& bounds, int rank) {
    const Verdict& verdict = state.ranks[rank].machine.verdict();
    const int slot = state.ranks[rank].operation % bounds.ring;
    const Record& culprit = state.records[verdict.rank][slot];
    if (culprit.number != verdict.number) return false;
    for (int r = 0; r < World; ++r) {
      const Record& record = state.records[r][slot];
      if (record.number == verdict.number && contradict(record.kind, culprit.kind)) return true;
    }
    return false;
  }

  // A wait that patience cannot end must not be for a rank that may never come.
  static const char* waits_wrongly(const State& state, const Bounds& bounds, int rank) {
    const Machine& machine = state.ranks[rank].machine;
    if (machine.may_give_up()) return nullptr;
    const Verdict occupant =
        Verdict::unpack(state.verdicts[machine.number() % static_cast<uint64_t>(bounds.ring)]);
    // A rank that is late for an error makes others wait: its verdict must not be lost to it.
    if (occupant.outcome == Outcome::kError) return nullptr;
    if (occupant.outcome != Outcome::kDirect) return "impatience is refused";
    State alone = state;
    const auto awaited = static_cast<uint8_t>(machine.waiting_for());
    while (alone.consumed[awaited] < occupant.number) {
      const Effect effect = apply(alone, bounds, {awaited, false, 0});
      if (!effect.moved) return "waits without end for a rank that does not consume by itself";
    }
    return nullptr;
  }

  // All ranks must go on alike from an operation, and those that go direct know all records.
  static const char* finish(State& state, const Bounds& bounds, int index) {
    Rank& rank = state.ranks[index];
    Outcome outcome = rank.machine.verdict().outcome;
    // A lapped rank takes what was deferred for late: the arrivals then tell it.
    if (outcome == Outcome::kLate || outcome == Outcome::kDeferred) outcome = Outcome::kInner;
    Outcome& went = state.went[rank.operation];
    if (went != Outcome::kNone && went != outcome) return "ranks part ways";
    if (outcome == Outcome::kDirect && !copies_intact(rank)) {
      return "goes direct without the records of all ranks";
    }
    went = outcome;
    const uint8_t operation = rank.operation;
    rank = Rank{};
    rank.operation = operation;
    rank.machine = fresh(index, bounds);
    bool all = true;
    for (const Rank& other : state.ranks) {
      all &= other.operation > operation || (other.operation == operation && !other.inside());
    }
    if (all) went = Outcome::kNone;
    return nullptr;
  }
};

}  // namespace explore
