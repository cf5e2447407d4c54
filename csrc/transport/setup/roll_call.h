// How the ranks of a group find one another on the group's store, and hear each other's answers.
//
// A store outlives its groups, and a group that is made again finds the keys of the one before.
// So each making of a group has a nonce on every rank, and nothing said in one is taken for
// another:
//   - Making the group, a rank posts its nonce and its record at `at/<rank>`, in place of an older
//     one. Records that rule a transport out are all that the ranks need to hear: one whose
//     settings never make it vote is not waited for.
//   - Voting, rank 0 reads these and calls each rank by its nonce: `call/<nonce>` has the vote's
//     name, which is rank 0's own nonce. A rank takes part once it is called by the nonce that it
//     has now. As long as an answer is missing, rank 0 looks whether there is a newer nonce. One
//     that another vote has called is not called again.
//   - The keys of a step begin with the vote's name. Every rank posts its answer, and rank 0 posts
//     all of them as one: what the store is asked grows with the ranks, not with their square.
//   - A rank whose vote fails tells rank 0 (`failed/<vote>`), and rank 0 all others, in place of
//     the answers: none goes on with one that has given up and may have made its group again.
// What has been read is removed, so that a vote leaves nothing on the store.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/health/peers.h"
#include "transport/memory/control_page.h"
#include "transport/setup/vote_records.h"

namespace pg_sdma {

// The group's store, as far as the vote needs it. All throw std::runtime_error when they cannot go
// on.
class Board {
 public:
  virtual ~Board() = default;
  virtual void post(const std::string& key, const std::string& value) = 0;
  // Posts unless something is there. Returns what is there then.
  virtual std::string claim(const std::string& key, const std::string& value) = 0;
  // Whether all keys are there, once they are or at the latest after `timeout`.
  virtual bool await(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) = 0;
  // What is at keys that are there, and that nobody removes meanwhile.
  virtual std::vector<std::string> get(const std::vector<std::string>& keys) = 0;
  // What is at a key now.
  virtual std::optional<std::string> peek(const std::string& key) = 0;
  virtual void remove(const std::string& key) = 0;
  // How many have counted at this key, this call among them.
  virtual int64_t count(const std::string& key) = 0;
};

class RollCall {
 public:
  struct Options {
    std::string group;  // for messages
    std::string lane;   // the lanes of a group vote apart
    int rank = 0;
    int world = 1;
    std::string host;  // ranks that share it can look at each other's processes
  };

  RollCall(Options options, std::shared_ptr<Board> board);

  // Posts that this rank has made the group, with its answer to the first step. Does not block.
  void announce(const Fields& record);
  // The inner carries an operation before the vote: the first is told to ranks that wait in vain
  // for this one. Does not throw.
  void note_elsewhere(const std::string& operation) noexcept;
  // All steps of the vote together have `timeout` from now on.
  void begin(std::chrono::milliseconds timeout);
  // Gives this rank's answer to a step, and returns those of all ranks, which take the same steps.
  // Throws std::runtime_error naming the ranks that have not come in time, those whose process has
  // ended, or one that has failed.
  std::vector<std::string> ask(const std::string& step, const std::string& answer);
  // Whose end to notice from now on: the ranks' processes. Before, ask() knows some by itself.
  // Throws std::runtime_error where that cannot be.
  void watch(const std::vector<int>& pids);
  // After the last step.
  void end();

  // Throws as ask() does, for a reason that every rank knows.
  [[noreturn]] void fail(const std::string& what, const std::string& step) const;

 private:
  // A rank as it announced itself.
  struct Present {
    std::string record;
    std::string nonce;
    int pid = 0;  // 0: on another host
  };
  struct Looks;
  struct Roll;

  std::string key(const std::string& name) const { return options_.lane + "/" + name; }
  std::string elsewhere(int rank) const { return key("elsewhere/" + std::to_string(rank)); }
  std::string at(int rank) const { return key("at/" + std::to_string(rank)); }
  std::string together(const std::string& step) const { return key(vote_ + "/" + step); }
  std::string answer_of(int rank, const std::string& step) const;
  std::string failure_of(int rank, const std::string& vote) const {
    return key("failed/" + vote + "/" + std::to_string(rank));
  }
  std::vector<std::string> answers_to(const std::string& step) const;
  Present read(const std::string& announcement) const;

  void heed_call();
  std::vector<std::string> gather_present(const std::string& step);
  void call_present(Roll& roll, const std::string& step);
  void call_last(Roll& roll, const std::string& step) noexcept;
  bool hopeless(Roll& roll) const;
  std::vector<std::string> gather(const std::string& step);
  std::vector<std::string> hear(const std::string& step);
  std::vector<std::string> all_answers(const std::string& step) const;
  std::vector<std::string> tell_all(std::vector<std::string> answers,
                                    const std::string& step) const;
  std::vector<std::string> announced(const Roll& roll) const;
  bool answered(int rank, const std::string& step) const;
  void heed_failure() const;
  std::string first_operation_of(int rank) const;  // in a message, in brackets
  std::string unanswered(const std::string& step) const;
  std::string unannounced() const;  // while nobody has heard all answers to the first step
  std::string without(const std::function<std::string(int)>& key) const;  // the ranks', in words
  void tell(const std::string& step, const std::string& why) noexcept;
  void watch(const std::vector<Present>& ranks);

  const Options options_;
  const std::shared_ptr<Board> board_;
  const std::string nonce_;
  std::string announcement_;
  std::string first_elsewhere_;   // the inner's first operation
  std::string vote_;              // its name; empty until this rank takes part
  std::string heard_;             // where the answers to the last step are
  std::unique_ptr<Peers> peers_;  // whose end is noticed
  Clock::time_point deadline_;
  std::chrono::milliseconds timeout_{0};
};

}  // namespace pg_sdma
