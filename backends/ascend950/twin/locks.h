// Locks of buffers: pipes of one core take turns, without naming the pipe that went before.
#pragma once

#include "sync.h"

// asc-devkit, docs: asc_mutex_execute_mode, in asc_lock.md
enum asc_mutex_execute_mode { ASC_LOCK_BLOCK = 0, ASC_LOCK_NON_BLOCK = 1 };

namespace twin {

TWIN_UNWATCHED inline Lock& checked_lock(pipe_t pipe, int id, int mode, const char* what) {
  const int slot = checked_slot(pipe, what);
  const bool allowed = slot == 0 || pipe == PIPE_MTE2 ||
                       (on_cube() ? pipe == PIPE_M || pipe == PIPE_MTE1 || pipe == PIPE_FIX
                                  : pipe == PIPE_V || pipe == PIPE_MTE3);
  if (!allowed) fault("argument", what, pipe, 0, "pipe %s of %s has no locks", pipe_name(slot), machine().core->name());
  if (id < 0 || id > 31) fault("argument", what, pipe, 0, "lock %d: ids are 0 to 31", id);
  if (mode != ASC_LOCK_BLOCK) fault("unimplemented", what, pipe, 0, "locks that do not block are not modelled");
  return machine().core->locks[id];
}

// The scalar unit issues everything in order, so a lock is free whenever a correct program takes it.
TWIN_UNWATCHED inline void take_lock(pipe_t pipe, int id, int mode, const char* what) {
  Lock& lock = checked_lock(pipe, id, mode, what);
  const auto slot = static_cast<int8_t>(slot_of(pipe));
  if (lock.holder >= 0) {
    fault("lock", what, pipe, 0, "lock %d is taken by pipe %s while pipe %s holds it", id, pipe_name(slot),
          pipe_name(lock.holder));
  }
  lock.holder = slot;
  machine().core->locks_used |= uint32_t{1} << id;
  ++machine().core->pending;
  // two turns of one pipe in a row are not ordered by the lock
  machine().core->learn(slot, lock.last == slot ? lock.before : lock.released);
}

TWIN_UNWATCHED inline void give_lock(pipe_t pipe, int id, int mode, const char* what) {
  Lock& lock = checked_lock(pipe, id, mode, what);
  const auto slot = static_cast<int8_t>(slot_of(pipe));
  if (lock.holder != slot) {
    fault("lock", what, pipe, 0, "lock %d is released by pipe %s, which does not hold it", id, pipe_name(slot));
  }
  lock.holder = -1;
  --machine().core->pending;
  if (lock.last != slot) {
    lock.before = lock.released;
    lock.last = slot;
  }
  lock.released.join(machine().core->publish(slot));
}

}  // namespace twin

// asc-devkit, docs: sync/asc_lock.md, asc_unlock.md; get_buf and rls_buf are the compiler's names for the same.
TWIN_UNWATCHED inline void asc_lock(pipe_t pipe, uint8_t id, int mode = ASC_LOCK_BLOCK) {
  twin::take_lock(pipe, id, mode, "asc_lock");
}
TWIN_UNWATCHED inline void asc_unlock(pipe_t pipe, uint8_t id, int mode = ASC_LOCK_BLOCK) {
  twin::give_lock(pipe, id, mode, "asc_unlock");
}
TWIN_UNWATCHED inline void get_buf(pipe_t pipe, uint8_t id, int mode) { twin::take_lock(pipe, id, mode, "get_buf"); }
TWIN_UNWATCHED inline void rls_buf(pipe_t pipe, uint8_t id, int mode) { twin::give_lock(pipe, id, mode, "rls_buf"); }
