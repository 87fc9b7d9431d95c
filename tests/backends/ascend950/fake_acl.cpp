// A driver made of host memory, for tests of the host path: it implements the functions of acl_rt.h that the backend
// calls, against the header itself, so a wrong signature here does not compile either.
//
// Work runs as late as a driver may run it: when the host waits for it, or for something behind it. A host path that
// reads too early, frees too early or forgets an event therefore gets wrong values. Every call is logged; a test can
// make the next call of a function fail, and is called back for every kernel that runs.

#include <acl/acl.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace {

using Work = std::function<void()>;
using KernelCallback = void (*)(const char *name, uint32_t blocks, const void *arguments, size_t bytes);

struct Graph {
    std::vector<Work> work;
};

struct Stream {
    std::deque<Work> work;
    Graph *capture = nullptr;
};

struct Mark {
    Stream *stream = nullptr;
    bool reached = false;
    float milliseconds = 0;
};

struct Event {
    std::shared_ptr<Mark> mark;
};

struct Binary {
    std::string content;
};

struct Function {
    std::string name;
};

constexpr size_t kMemory = size_t{1} << 24;

std::string g_log, g_message, g_failing;
int g_failure = 0;
bool g_initialised = false;
size_t g_used = 0;
std::map<void *, size_t> g_sizes;
std::set<Stream *> g_streams;
float g_clock = 0;
KernelCallback g_on_kernel = nullptr;
thread_local bool g_has_context = false;
int g_context;

// Log a call; the code that a test asked it to fail with, or success.
aclError begin(const char *name, const std::string &detail = "", bool needs_context = true) {
    g_log += name + (detail.empty() ? "" : " " + detail) + "\n";
    if (g_failing == name) {
        g_failing.clear();
        g_message = std::string("injected into ") + name;
        return g_failure;
    }
    if (needs_context && !g_has_context) {
        g_message = "no context is current in this thread";
        return 107002;
    }
    return ACL_SUCCESS;
}

void submit(Stream *stream, Work work) {
    if (stream->capture) {
        stream->capture->work.push_back(std::move(work));
    } else {
        stream->work.push_back(std::move(work));
    }
}

bool step(Stream *stream) {
    if (stream->work.empty()) return false;
    Work work = std::move(stream->work.front());
    stream->work.pop_front();
    work();
    return true;
}

void reach(const std::shared_ptr<Mark> &mark) {
    while (!mark->reached && step(mark->stream)) {
    }
}

Stream *as_stream(aclrtStream stream) { return static_cast<Stream *>(stream); }

}  // namespace

extern "C" {

const char *fake_acl_log() { return g_log.c_str(); }
void fake_acl_clear_log() { g_log.clear(); }
void fake_acl_fail_next(const char *name, int code) {
    g_failing = name;
    g_failure = code;
}
void fake_acl_on_kernel(KernelCallback callback) { g_on_kernel = callback; }

aclError aclInit(const char *) {
    if (aclError code = begin("aclInit", "", false)) return code;
    if (g_initialised) return ACL_ERROR_REPEAT_INITIALIZE;
    g_initialised = true;
    return ACL_SUCCESS;
}

const char *aclGetRecentErrMsg() { return g_message.empty() ? nullptr : g_message.c_str(); }
const char *aclrtGetSocName() { return "Ascend950DT_9572"; }

aclError aclrtSetDevice(int32_t device) {
    if (aclError code = begin("aclrtSetDevice", std::to_string(device), false)) return code;
    if (device > 1) {
        g_message = "there is no such device";
        return 107001;
    }
    g_has_context = true;
    return ACL_SUCCESS;
}

aclError aclrtGetDevice(int32_t *device) {
    *device = 0;
    return begin("aclrtGetDevice");
}

aclError aclrtGetDeviceCount(uint32_t *count) {
    *count = 2;
    return begin("aclrtGetDeviceCount");
}

aclError aclrtGetCurrentContext(aclrtContext *context) {
    *context = &g_context;
    return begin("aclrtGetCurrentContext");
}

aclError aclrtSetCurrentContext(aclrtContext context) {
    if (aclError code = begin("aclrtSetCurrentContext", "", false)) return code;
    g_has_context = context == &g_context;
    return g_has_context ? ACL_SUCCESS : 107002;
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t *available, size_t *total) {
    *total = kMemory;
    *available = kMemory - g_used;
    return begin("aclrtGetMemInfo");
}

aclError aclrtMalloc(void **pointer, size_t size, aclrtMemMallocPolicy) {
    if (aclError code = begin("aclrtMalloc", std::to_string(size))) return code;
    if (size > kMemory - g_used) {
        g_message = "out of device memory";
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    }
    *pointer = std::aligned_alloc(512, (size + 511) / 512 * 512);
    std::memset(*pointer, 0xA5, size);  // what is not written is not zero
    g_sizes[*pointer] = size;
    g_used += size;
    return ACL_SUCCESS;
}

aclError aclrtFree(void *pointer) {
    if (aclError code = begin("aclrtFree")) return code;
    g_used -= g_sizes.at(pointer);
    g_sizes.erase(pointer);
    std::free(pointer);
    return ACL_SUCCESS;
}

aclError aclrtMallocHost(void **pointer, size_t size) {
    *pointer = std::aligned_alloc(64, (size + 63) / 64 * 64);
    return begin("aclrtMallocHost", std::to_string(size));
}

aclError aclrtFreeHost(void *pointer) {
    std::free(pointer);
    return begin("aclrtFreeHost");
}

aclError aclrtMemcpyAsync(void *target, size_t room, const void *source, size_t size, aclrtMemcpyKind kind,
                          aclrtStream stream) {
    if (aclError code = begin("aclrtMemcpyAsync", std::to_string(kind))) return code;
    if (size > room) return ACL_ERROR_INVALID_PARAM;
    submit(as_stream(stream), [=] { std::memcpy(target, source, size); });
    return ACL_SUCCESS;
}

aclError aclrtMemsetAsync(void *target, size_t room, int32_t value, size_t size, aclrtStream stream) {
    if (aclError code = begin("aclrtMemsetAsync")) return code;
    if (size > room) return ACL_ERROR_INVALID_PARAM;
    submit(as_stream(stream), [=] { std::memset(target, value, size); });
    return ACL_SUCCESS;
}

aclError aclrtCreateStream(aclrtStream *stream) {
    if (aclError code = begin("aclrtCreateStream")) return code;
    auto *made = new Stream;
    g_streams.insert(made);
    *stream = made;
    return ACL_SUCCESS;
}

aclError aclrtDestroyStream(aclrtStream stream) {
    if (aclError code = begin("aclrtDestroyStream")) return code;
    g_streams.erase(as_stream(stream));
    delete as_stream(stream);
    return ACL_SUCCESS;
}

aclError aclrtSynchronizeStream(aclrtStream stream) {
    if (aclError code = begin("aclrtSynchronizeStream")) return code;
    if (as_stream(stream)->capture) return ACL_ERROR_RT_STREAM_CAPTURED;
    while (step(as_stream(stream))) {
    }
    return ACL_SUCCESS;
}

aclError aclrtSynchronizeDevice() {
    if (aclError code = begin("aclrtSynchronizeDevice")) return code;
    for (Stream *stream : g_streams) {
        while (step(stream)) {
        }
    }
    return ACL_SUCCESS;
}

aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flag) {
    if (aclError code = begin("aclrtCreateEventExWithFlag", std::to_string(flag))) return code;
    *event = new Event;
    return ACL_SUCCESS;
}

aclError aclrtDestroyEvent(aclrtEvent event) {
    delete static_cast<Event *>(event);
    return begin("aclrtDestroyEvent", "", false);
}

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
    if (aclError code = begin("aclrtRecordEvent")) return code;
    auto mark = std::make_shared<Mark>();
    mark->stream = as_stream(stream);
    static_cast<Event *>(event)->mark = mark;
    submit(as_stream(stream), [mark] {
        mark->reached = true;
        mark->milliseconds = g_clock += 0.5F;
    });
    return ACL_SUCCESS;
}

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
    if (aclError code = begin("aclrtStreamWaitEvent")) return code;
    auto mark = static_cast<Event *>(event)->mark;
    submit(as_stream(stream), [mark] { reach(mark); });
    return ACL_SUCCESS;
}

aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status) {
    if (aclError code = begin("aclrtQueryEventStatus")) return code;
    auto mark = static_cast<Event *>(event)->mark;
    *status = mark->reached ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
    return ACL_SUCCESS;
}

aclError aclrtSynchronizeEvent(aclrtEvent event) {
    if (aclError code = begin("aclrtSynchronizeEvent")) return code;
    reach(static_cast<Event *>(event)->mark);
    return ACL_SUCCESS;
}

aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent first, aclrtEvent last) {
    if (aclError code = begin("aclrtEventElapsedTime")) return code;
    *milliseconds = static_cast<Event *>(last)->mark->milliseconds - static_cast<Event *>(first)->mark->milliseconds;
    return ACL_SUCCESS;
}

aclError aclrtBinaryLoadFromFile(const char *path, aclrtBinaryLoadOptions *, aclrtBinHandle *binary) {
    if (aclError code = begin("aclrtBinaryLoadFromFile")) return code;
    std::ifstream file(path, std::ios::binary);
    auto *made = new Binary;
    made->content.assign(std::istreambuf_iterator<char>(file), {});
    *binary = made;
    return made->content.rfind("\x7f"
                               "ELF",
                               0) == 0
               ? ACL_SUCCESS
               : ACL_ERROR_INVALID_FILE;
}

aclError aclrtBinaryUnLoad(aclrtBinHandle binary) {
    delete static_cast<Binary *>(binary);
    return begin("aclrtBinaryUnLoad");
}

aclError aclrtBinaryGetFunction(const aclrtBinHandle binary, const char *name, aclrtFuncHandle *function) {
    if (aclError code = begin("aclrtBinaryGetFunction", name)) return code;
    if (static_cast<Binary *>(binary)->content.find(name) == std::string::npos) return ACL_ERROR_KERNEL_NOT_FOUND;
    *function = new Function{name};
    return ACL_SUCCESS;
}

aclError aclrtLaunchKernelWithHostArgs(aclrtFuncHandle function, uint32_t blocks, aclrtStream stream,
                                       aclrtLaunchKernelCfg *config, void *arguments, size_t size,
                                       aclrtPlaceHolderInfo *places, size_t num_places) {
    const auto &name = static_cast<Function *>(function)->name;
    std::string detail = name + " blocks=" + std::to_string(blocks) + " bytes=" + std::to_string(size);
    for (size_t place = 0; config && place < config->numAttrs; ++place) {
        const auto &attribute = config->attrs[place];
        if (attribute.id == ACL_RT_LAUNCH_KERNEL_ATTR_SCHEM_MODE) {
            detail += " schedule=" + std::to_string(attribute.value.schemMode);
        } else if (attribute.id == ACL_RT_LAUNCH_KERNEL_ATTR_DYN_UBUF_SIZE) {
            detail += " ub=" + std::to_string(attribute.value.dynUBufSize);
        } else if (attribute.id == ACL_RT_LAUNCH_KERNEL_ATTR_TIMEOUT) {
            detail += " seconds=" + std::to_string(attribute.value.timeout);
        }
    }
    if (aclError code = begin("aclrtLaunchKernelWithHostArgs", detail)) return code;
    if (blocks == 0 || size % 8 || places || num_places) return ACL_ERROR_INVALID_PARAM;
    auto *bytes = static_cast<const char *>(arguments);
    std::vector<char> copy(bytes, bytes + size);  // the caller's memory is free again when this returns
    submit(as_stream(stream), [=] {
        if (g_on_kernel) g_on_kernel(name.c_str(), blocks, copy.data(), copy.size());
    });
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode mode) {
    if (aclError code = begin("aclmdlRICaptureBegin", std::to_string(mode))) return code;
    as_stream(stream)->capture = new Graph;
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus *status, aclmdlRI *graph) {
    *graph = as_stream(stream)->capture;
    *status = *graph ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
    return begin("aclmdlRICaptureGetInfo");
}

aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI *graph) {
    if (aclError code = begin("aclmdlRICaptureEnd")) return code;
    *graph = as_stream(stream)->capture;
    as_stream(stream)->capture = nullptr;
    return *graph ? ACL_SUCCESS : ACL_ERROR_RT_STREAM_NOT_CAPTURED;
}

aclError aclmdlRIExecuteAsync(aclmdlRI graph, aclrtStream stream) {
    if (aclError code = begin("aclmdlRIExecuteAsync")) return code;
    for (const Work &work : static_cast<Graph *>(graph)->work) submit(as_stream(stream), work);
    return ACL_SUCCESS;
}

aclError aclmdlRIDestroy(aclmdlRI graph) {
    delete static_cast<Graph *>(graph);
    return begin("aclmdlRIDestroy", "", false);
}

}  // extern "C"
