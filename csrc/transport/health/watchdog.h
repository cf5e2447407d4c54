// Watches the operations that a GPU carries out while no host waits for them. Reads only the
// control page: a driver call could block behind the very stream that hangs.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "transport/health/peers.h"
#include "transport/memory/control_page.h"

namespace pg_sdma {

class Watchdog {
 public:
  // Calls `end` once, from its own thread, with what is wrong: a peer that an outstanding operation
  // needs has ended, or left without having made it, an operation is past its deadline, or a peer
  // has declared the group broken. `end` usually does not return: nothing may compute on what was
  // not gathered.
  Watchdog(ControlPage& page, const Peers& peers, std::string group, int rank, int world,
           std::function<void(const std::string&)> end);
  ~Watchdog();

  // Operation `number` is about to be enqueued, in which the host may block: `bytes` of `what`
  // ("output", or "input"). Numbers grow.
  void watch(uint64_t number, std::string operation, uint64_t bytes, Clock::time_point deadline,
             const char* what = "output");

  // Whether all operations so far are done, on every rank.
  bool idle();

 private:
  struct Operation {
    uint64_t number;
    std::string name;
    uint64_t bytes;
    Clock::time_point start;
    Clock::time_point deadline;
    const char* what;
  };

  void serve();
  bool finished(const Operation& operation) const;
  // What is wrong with the oldest operation; empty while nothing is.
  std::string trouble(const Operation& operation) const;

  ControlPage& page_;
  const Peers& peers_;
  const std::string group_;
  const int rank_;
  const int world_;
  const std::function<void(const std::string&)> end_;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Operation> outstanding_;
  bool stopping_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace pg_sdma
