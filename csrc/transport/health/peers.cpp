#include "transport/health/peers.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>

namespace pg_sdma {

class Peers::Process {
 public:
  explicit Process(int pid) : descriptor_(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))) {
    // One that ended before we could hold it is remembered as that.
    if (descriptor_ >= 0 || errno == ESRCH) return;
    throw std::runtime_error(
        "process " + std::to_string(pid) +
        " cannot be watched, so that nobody would notice its end: " + std::strerror(errno));
  }
  ~Process() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  bool gone() const {
    if (descriptor_ < 0) return true;
    pollfd ended{descriptor_, POLLIN, 0};
    return poll(&ended, 1, 0) == 1;
  }

 private:
  const int descriptor_;  // a pidfd
};

namespace {

struct Registry {
  const pid_t owner = getpid();
  std::mutex mutex;
  std::map<int, std::weak_ptr<const void>> processes;  // by id
};

// A forked child begins with a new one: the parent's lock may have been held by a thread that the
// child does not have.
Registry& registry() {
  static Registry* registry = new Registry();  // groups may go after static destructors
  if (registry->owner != getpid()) registry = new Registry();
  return *registry;
}

}  // namespace

std::shared_ptr<const Peers::Process> Peers::process(int pid) {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  std::erase_if(all.processes, [](const auto& each) { return each.second.expired(); });
  std::weak_ptr<const void>& known = all.processes[pid];
  auto found = std::static_pointer_cast<const Process>(known.lock());
  // The id of one that has ended may be another's by now.
  if (!found || found->gone()) {
    found = std::make_shared<const Process>(pid);
    known = found;
  }
  return found;
}

Peers::Peers(const std::vector<int>& pids) : pids_(pids) {
  for (const int pid : pids) processes_.push_back(process(pid));
}

bool Peers::gone(int rank) const { return processes_[rank]->gone(); }

}  // namespace pg_sdma
