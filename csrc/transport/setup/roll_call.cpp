#include "transport/setup/roll_call.h"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <utility>

#include "engine/inject.h"

namespace pg_sdma {
namespace {

// How often a waiting rank looks around: whether those it waits for still live.
constexpr std::chrono::milliseconds kFirstLook{50};
constexpr std::chrono::milliseconds kLook{500};

// How long the first rank waits for newer records where those that are there rule a transport out:
// they may be of a making before.
constexpr std::chrono::milliseconds kAnotherLook{500};

// What stands before all answers to a step, or before why there are none.
constexpr char kAnswers = '=';
constexpr char kFailure = '!';

// Why a vote cannot go on, without who says so and where.
struct Failure {
  std::string what;
  bool told = false;  // by rank 0, to all
};

std::string name_of(int rank) { return "rank " + std::to_string(rank); }

}  // namespace

// The pauses between a waiting rank's looks, and whose process had ended before the last of them:
// what a rank posted before it ended counts.
struct RollCall::Looks {
  explicit Looks(const RollCall& call) : call(call) {}

  // For how long to wait at the store now.
  std::chrono::milliseconds begin() {
    ended.assign(static_cast<size_t>(call.options_.world), false);
    for (int rank = 0; call.peers_ && rank < call.options_.world; ++rank) {
      ended[rank] = call.peers_->gone(rank);
    }
    last = Clock::now() + pause >= call.deadline_;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(call.deadline_ - Clock::now());
    return last ? std::max(left, std::chrono::milliseconds(0)) : pause;
  }

  // After a wait in vain. Throws Failure where it is the last, or a rank will never come.
  template <class Answered, class Missing>
  void end(Answered&& answered, Missing&& missing) {
    for (int rank = 0; rank < call.options_.world; ++rank) {
      if (!ended[rank] || answered(rank)) continue;
      throw Failure{"waits for " + name_of(rank) +
                    ", whose process has ended (look at its output for the cause)"};
    }
    if (last) {
      throw Failure{"waited " + std::to_string(call.timeout_.count()) + " ms in vain for " +
                    missing() + " to make it. Look for that rank's error"};
    }
    pause = std::min(2 * pause, kLook);
  }

  const RollCall& call;
  std::chrono::milliseconds pause = kFirstLook;
  std::vector<bool> ended;
  bool last = false;
};

// Whom the first rank has called. Those that do not answer to their nonce any more are called anew.
struct RollCall::Roll {
  explicit Roll(size_t world) : ranks(world), called(world, false), come(world, false) {
    called[0] = come[0] = true;
  }

  std::vector<Present> ranks;
  std::vector<bool> called, come;   // come: has answered
  std::vector<std::string> absent;  // what they will announce themselves by
  Clock::time_point hopeless_since{};
};

RollCall::RollCall(Options options, std::shared_ptr<Board> board)
    : options_(std::move(options)),
      board_(std::move(board)),
      nonce_(std::to_string(random_nonce())) {}

std::string RollCall::answer_of(int rank, const std::string& step) const {
  return together(step) + "/" + std::to_string(rank);
}

std::vector<std::string> RollCall::answers_to(const std::string& step) const {
  std::vector<std::string> keys;
  for (int rank = 0; rank < options_.world; ++rank) keys.push_back(answer_of(rank, step));
  return keys;
}

RollCall::Present RollCall::read(const std::string& announcement) const {
  const Fields fields = read_fields(announcement);
  const bool here = fields.at("host") == options_.host;
  return {announcement, fields.at("nonce"), here ? std::stoi(fields.at("pid")) : 0};
}

void RollCall::announce(const Fields& record) {
  Fields announced = record;
  announced["nonce"] = nonce_;
  announced["pid"] = std::to_string(getpid());
  announced["host"] = options_.host;
  announcement_ = write_fields(announced);
  board_->post(at(options_.rank), announcement_);
}

void RollCall::note_elsewhere(const std::string& operation) noexcept {
  if (!first_elsewhere_.empty()) return;
  first_elsewhere_ = operation;
  try {
    board_->post(elsewhere(options_.rank),
                 write_fields({{"nonce", nonce_}, {"operation", operation}}));
  } catch (const std::exception&) {
    // It is for a message alone, and the inner has its own errors of a store that is gone.
  }
}

void RollCall::begin(std::chrono::milliseconds timeout) {
  timeout_ = timeout;
  deadline_ = Clock::now() + timeout;
}

void RollCall::watch(const std::vector<int>& pids) {
  peers_ = pids.empty() ? nullptr : std::make_unique<Peers>(pids);
}

void RollCall::watch(const std::vector<Present>& ranks) {
  // In the place of those that are not known, this process, which lives.
  std::vector<int> pids(static_cast<size_t>(options_.world), getpid());
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank].pid > 0) pids[rank] = ranks[rank].pid;
  }
  try {
    watch(pids);
  } catch (const std::runtime_error&) {
    peers_.reset();  // the timeout tells; and a later step refuses to go on so
  }
}

std::vector<std::string> RollCall::ask(const std::string& step, const std::string& answer) {
  try {
    const bool first = vote_.empty();
    if (first && options_.rank != 0) heed_call();
    if (first && options_.rank == 0) vote_ = nonce_;
    board_->post(answer_of(options_.rank, step), answer);
    std::vector<std::string> answers = options_.rank != 0 ? hear(step)
                                       : first            ? gather_present(step)
                                                          : gather(step);
    board_->remove(answer_of(options_.rank, step));
    if (first) board_->remove(at(options_.rank));
    if (first) board_->remove(elsewhere(options_.rank));
    heard_ = together(step);
    return answers;
  } catch (const Failure& failure) {
    if (!failure.told) tell(step, failure.what);
    fail(failure.what, step);
  } catch (const std::exception& error) {
    const std::string why = std::string("fails in its vote: ") + one_line(error.what());
    tell(step, options_.rank == 0 ? "cannot go on: rank 0 " + why : why);
    throw;
  }
}

// A rank other than the first, until it is called.
void RollCall::heed_call() {
  const std::string call = key("call/" + nonce_);
  std::string seen;
  const auto has_come = [&](int first) {
    const auto announced = board_->peek(at(first));
    if (!announced || *announced == seen) return false;
    seen = *announced;
    watch(std::vector<Present>{read(seen)});
    return true;
  };
  for (Looks looks(*this); !board_->await({call}, looks.begin());) {
    looks.end(has_come, [&] {
      const std::string others = unannounced();
      return others.empty() ? name_of(0) : others;
    });
    has_come(0);
  }
  const std::string first = board_->get({call})[0];
  board_->remove(call);
  const Present caller = read(first);
  watch(std::vector<Present>{caller});
  vote_ = caller.nonce;
}

// The first rank's first step: calls the others as they come.
std::vector<std::string> RollCall::gather_present(const std::string& step) {
  Roll roll(static_cast<size_t>(options_.world));
  try {
    for (Looks looks(*this);;) {
      call_present(roll, step);
      const auto patience = looks.begin();
      if (hopeless(roll)) return tell_all(announced(roll), step);
      if (!roll.absent.empty()) {
        if (board_->await(roll.absent, patience)) continue;
      } else if (board_->await(answers_to(step), patience)) {
        return all_answers(step);
      }
      heed_failure();
      looks.end(
          [&](int rank) { return !roll.called[rank] || roll.come[rank] || answered(rank, step); },
          [&] {
            const std::string others = unannounced();
            return others.empty() ? unanswered(step) : others;
          });
      if (!peers_) watch(roll.ranks);
    }
  } catch (...) {
    call_last(roll, step);
    throw;
  }
}

// Throws Failure where a rank has failed, once all others are called: to hear of that.
void RollCall::call_present(Roll& roll, const std::string& step) {
  roll.absent.clear();
  std::vector<int> made;  // the group, since the last look
  for (int rank = 1; rank < options_.world; ++rank) {
    if (roll.called[rank] && !roll.come[rank]) roll.come[rank] = answered(rank, step);
    if (roll.come[rank]) continue;
    if (const auto announced = board_->peek(at(rank))) {
      Present present = read(*announced);
      if (present.nonce == roll.ranks[rank].nonce) continue;
      // Called as it was in a group before, it has made this one since.
      if (roll.called[rank]) board_->remove(key("call/" + roll.ranks[rank].nonce));
      roll.called[rank] = false;
      roll.ranks[rank] = std::move(present);
      made.push_back(rank);
    } else if (!roll.called[rank]) {
      roll.absent.push_back(at(rank));
    }
  }
  const bool failed = !made.empty() && board_->peek(key("failed/" + nonce_));
  for (const int rank : made) {
    // What a rank announces once it has failed is its next making of the group.
    if (failed && board_->peek(failure_of(rank, nonce_))) continue;
    const std::string call = key("call/" + roll.ranks[rank].nonce);
    roll.called[rank] = board_->claim(call, announcement_) == announcement_;
    peers_.reset();
  }
  if (failed) heed_failure();
}

void RollCall::call_last(Roll& roll, const std::string& step) noexcept {
  try {
    call_present(roll, step);
  } catch (...) {
    // What is wrong is being thrown already.
  }
}

// The first rank's other steps.
std::vector<std::string> RollCall::gather(const std::string& step) {
  for (Looks looks(*this); !board_->await(answers_to(step), looks.begin());) {
    heed_failure();
    looks.end([&](int rank) { return answered(rank, step); }, [&] { return unanswered(step); });
  }
  board_->remove(heard_);  // who answers has read it
  return all_answers(step);
}

std::vector<std::string> RollCall::all_answers(const std::string& step) const {
  return tell_all(board_->get(answers_to(step)), step);
}

std::vector<std::string> RollCall::tell_all(std::vector<std::string> answers,
                                            const std::string& step) const {
  board_->post(together(step), kAnswers + write_list(answers));
  return answers;
}

std::vector<std::string> RollCall::announced(const Roll& roll) const {
  std::vector<std::string> records;
  for (const Present& rank : roll.ranks) records.push_back(rank.record);
  records[0] = announcement_;
  return records;
}

// Whether the records of all ranks have ruled a transport out for a while.
bool RollCall::hopeless(Roll& roll) const {
  if (!roll.absent.empty() || !objection(announced(roll))) {
    roll.hopeless_since = {};
    return false;
  }
  if (roll.hopeless_since == Clock::time_point{}) roll.hopeless_since = Clock::now();
  return Clock::now() >= roll.hopeless_since + kAnotherLook;
}

// Every step of the other ranks.
std::vector<std::string> RollCall::hear(const std::string& step) {
  for (Looks looks(*this); !board_->await({together(step)}, looks.begin());) {
    // The first rank is waited for even where it has answered.
    looks.end([&](int rank) { return rank != 0 && answered(rank, step); },
              [&] {
                const std::string others = unanswered(step);
                return others.empty() ? name_of(0) : others;
              });
  }
  const std::string text = board_->get({together(step)})[0];
  if (text[0] == kFailure) throw Failure{text.substr(1), true};
  return read_list(text.substr(1));
}

bool RollCall::answered(int rank, const std::string& step) const {
  return board_->peek(answer_of(rank, step)).has_value();
}

std::string RollCall::unanswered(const std::string& step) const {
  return without([&](int rank) { return answer_of(rank, step); });
}

std::string RollCall::unannounced() const {
  return without([&](int rank) { return at(rank); });
}

std::string RollCall::without(const std::function<std::string(int)>& key) const {
  std::string ranks;
  for (int rank = 0; rank < options_.world; ++rank) {
    if (board_->peek(key(rank))) continue;
    ranks += (ranks.empty() ? "" : ", ") + name_of(rank) + first_operation_of(rank);
  }
  return ranks;
}

// Of a rank that has not voted yet. It says nothing of one that has begun as this one did.
std::string RollCall::first_operation_of(int rank) const {
  const auto told = board_->peek(elsewhere(rank));
  const auto announced = board_->peek(at(rank));
  if (!told || !announced) return "";
  const Fields first = read_fields(*told);
  const bool of_this_making = first.at("nonce") == read(*announced).nonce;
  if (!of_this_making || first.at("operation") == first_elsewhere_) return "";
  return " (whose first operation in this group was " + first.at("operation") + ")";
}

// Of another rank, which has then given up.
void RollCall::heed_failure() const {
  if (const auto why = board_->peek(key("failed/" + nonce_))) {
    throw Failure{"cannot go on: " + *why};
  }
}

void RollCall::tell(const std::string& step, const std::string& why) noexcept {
  try {
    if (options_.rank == 0) {
      board_->post(together(step), kFailure + why);
      return;
    }
    std::string vote = vote_;
    if (vote.empty()) {
      board_->remove(at(options_.rank));  // the first rank, late, is not to call it any more
      const auto first = board_->peek(at(0));
      if (!first) return;
      vote = read(*first).nonce;
    }
    board_->post(failure_of(options_.rank, vote), why);
    board_->post(key("failed/" + vote), name_of(options_.rank) + " " + why);
  } catch (const std::exception&) {
    // The store has gone: nobody hears anything any more.
  }
}

void RollCall::end() {
  peers_.reset();
  const std::string ended = together("ended");
  if (board_->count(ended) < options_.world) return;
  board_->remove(ended);
  board_->remove(heard_);
}

void RollCall::fail(const std::string& what, const std::string& step) const {
  throw std::runtime_error(name_of(options_.rank) + ": the first direct operation of group " +
                           options_.group + " " + what + " (step " + step + " of the vote).");
}

}  // namespace pg_sdma
