// Tells whether this process is a fork of the one that made an object: threads and locks of the
// parent do not exist here.
#pragma once

#include <atomic>

namespace pg_sdma {

class ForkGuard {
 public:
  ForkGuard();
  bool forked() const;

 private:
  unsigned made_in_;
};

}  // namespace pg_sdma
