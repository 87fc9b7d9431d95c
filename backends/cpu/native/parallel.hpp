// Work over rows, spread over a few threads.
//
// Which thread runs a row cannot matter: kernels compute each row alone. The pool is made on first use, grows to the
// largest count asked for, and is never destroyed (joining threads while a process exits is where hangs come from).
// A forked child makes its own. A call from inside a worker, or while another caller holds the pool, runs inline.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

namespace deepinfer::cpu {

class ThreadPool {
public:
    // The pool of this process.
    static ThreadPool& instance() {
        static std::atomic<ThreadPool*> current{nullptr};
        ThreadPool* pool = current.load(std::memory_order_acquire);
        while (pool == nullptr || pool->process_ != process_id()) {
            ThreadPool* fresh = new ThreadPool();  // after a fork the old object's threads and locks are not ours
            if (current.compare_exchange_strong(pool, fresh, std::memory_order_acq_rel)) return *fresh;
            delete fresh;
        }
        return *pool;
    }

    // Run task(0) .. task(count - 1), the caller being one of `num_threads`. Rethrows the first exception.
    void run(std::int64_t count, int num_threads, const std::function<void(std::int64_t)>& task) {
        const int helpers = static_cast<int>(std::min<std::int64_t>(num_threads, count)) - 1;
        std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
        if (helpers < 1 || inside_worker() || !turn.owns_lock()) {
            for (std::int64_t i = 0; i < count; ++i) task(i);
            return;
        }
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            while (static_cast<int>(num_workers_) < helpers) start_worker();
            task_ = &task;
            count_ = count;
            next_.store(0, std::memory_order_relaxed);
            seats_ = helpers;
            error_ = nullptr;
        }
        wake_.notify_all();
        inside_worker() = true;
        drain(task, count);
        inside_worker() = false;
        std::unique_lock<std::mutex> lock(mutex_);
        seats_ = 0;  // a worker that has not woken yet need not come
        done_.wait(lock, [this] { return busy_ == 0; });
        task_ = nullptr;
        if (error_) std::rethrow_exception(error_);
    }

private:
    ThreadPool() : process_(process_id()) {}

    static long process_id() {
#if defined(__unix__) || defined(__APPLE__)
        return static_cast<long>(::getpid());
#else
        return 0;
#endif
    }

    static bool& inside_worker() {
        thread_local bool inside = false;
        return inside;
    }

    void start_worker() {
        std::thread([this] { work(); }).detach();
        ++num_workers_;
    }

    void work() {
        inside_worker() = true;
        std::unique_lock<std::mutex> lock(mutex_);
        while (true) {
            wake_.wait(lock, [this] { return seats_ > 0; });
            --seats_;
            ++busy_;
            const std::function<void(std::int64_t)>& task = *task_;
            const std::int64_t count = count_;
            lock.unlock();
            drain(task, count);
            lock.lock();
            if (--busy_ == 0) done_.notify_all();
        }
    }

    void drain(const std::function<void(std::int64_t)>& task, std::int64_t count) {
        while (true) {
            const std::int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
            if (i >= count) return;
            try {
                task(i);
            } catch (...) {
                const std::lock_guard<std::mutex> lock(mutex_);
                if (!error_) error_ = std::current_exception();
                next_.store(count, std::memory_order_relaxed);
            }
        }
    }

    const long process_;
    std::mutex turn_;  // one caller at a time
    std::mutex mutex_;
    std::condition_variable wake_;
    std::condition_variable done_;
    std::size_t num_workers_ = 0;
    int seats_ = 0;  // workers that the present job still takes
    int busy_ = 0;   // workers inside it
    const std::function<void(std::int64_t)>* task_ = nullptr;
    std::int64_t count_ = 0;
    std::atomic<std::int64_t> next_{0};
    std::exception_ptr error_;
};

// Call fn(begin, end) on pieces of at most `grain` rows that cover [0, n), on up to `num_threads` threads.
// Call it with the GIL released; fn must not touch Python. Rethrows the first exception of fn.
template <class Fn>
void parallel_rows(std::int64_t n, std::int64_t grain, int num_threads, Fn&& fn) {
    if (n <= 0) return;
    const std::int64_t step = std::max<std::int64_t>(grain, 1);
    if (num_threads <= 1 || n <= step) {
        fn(std::int64_t{0}, n);
        return;
    }
    ThreadPool::instance().run((n + step - 1) / step, num_threads, [&](std::int64_t piece) {
        fn(piece * step, std::min(n, (piece + 1) * step));
    });
}

}  // namespace deepinfer::cpu
