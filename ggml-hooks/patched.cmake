# Read by the patched llama.cpp's CMakeLists.txt right after its project() (CMAKE_PROJECT_INCLUDE).
#
# The patches touch some files of common/ and tools/, and no header of common/. All else is that of the stock build of the same
# revision: ggml, libllama and libmtmd, and the objects of files that are as they were.
# MOE_HOT_STOCK: the folder of that build. MOE_HOT_LLAMA: its sources. MOE_HOT_GLUE: our glue, a static library.
# MOE_HOT_PROGRAMS: what is wanted.
cmake_minimum_required(VERSION 3.19) # cmake_language(DEFER)

foreach(name IN ITEMS ggml-base ggml llama mtmd)
    add_library(${name} SHARED IMPORTED GLOBAL)
    set_target_properties(${name} PROPERTIES IMPORTED_LOCATION ${MOE_HOT_STOCK}/bin/lib${name}.so)
endforeach()
target_include_directories(ggml-base INTERFACE ${CMAKE_SOURCE_DIR}/ggml/include)
target_compile_definitions(ggml-base INTERFACE GGML_SHARED GGML_BACKEND_DL)
target_link_libraries(ggml INTERFACE ggml-base)
target_include_directories(llama INTERFACE ${CMAKE_SOURCE_DIR}/include)
target_compile_definitions(llama INTERFACE LLAMA_SHARED)
target_link_libraries(llama INTERFACE ggml)
target_include_directories(mtmd INTERFACE ${CMAKE_SOURCE_DIR}/tools/mtmd)
target_link_libraries(mtmd INTERFACE llama)

# Of all folders only these are wanted.
macro(add_subdirectory folder)
    if("${folder}" MATCHES "^(vendor|hash|miniaudio|nlohmann|sheredom|stb|cpp-httplib|common|tools|ui|server|cli|completion|llama-bench)$")
        _add_subdirectory(${folder} ${ARGN})
    endif()
endmacro()
# Nothing is installed, and libraries that are imported could not be.
macro(install)
endmacro()

# Takes the stock build's objects for all files of these targets that are as they were, and links our glue.
function(moe_hot_finish)
    foreach(target IN ITEMS llama-common cpp-httplib llama-completion-impl)
        get_target_property(here ${target} SOURCE_DIR)
        file(RELATIVE_PATH folder ${CMAKE_SOURCE_DIR} ${here})
        get_target_property(sources ${target} SOURCES)
        set(wanted)
        foreach(source IN LISTS sources)
            string(REPLACE "${here}/" "" source ${source})
            set(object ${MOE_HOT_STOCK}/${folder}/CMakeFiles/${target}.dir/${source}.o)
            execute_process(COMMAND ${CMAKE_COMMAND} -E compare_files ${CMAKE_SOURCE_DIR}/${folder}/${source}
                ${MOE_HOT_LLAMA}/${folder}/${source} RESULT_VARIABLE differs ERROR_QUIET)
            if(EXISTS ${object} AND NOT differs)
                list(APPEND wanted ${object})
            else()
                list(APPEND wanted ${source})
            endif()
        endforeach()
        set_target_properties(${target} PROPERTIES SOURCES "${wanted}" LINKER_LANGUAGE CXX)
    endforeach()
    target_link_libraries(llama-common PRIVATE ${MOE_HOT_GLUE})
    add_custom_target(moe-hot-programs DEPENDS ${MOE_HOT_PROGRAMS})
endfunction()

set(CMAKE_BUILD_RPATH "$ORIGIN")
cmake_language(DEFER DIRECTORY ${CMAKE_SOURCE_DIR} CALL moe_hot_finish)
