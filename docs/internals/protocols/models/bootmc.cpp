// SPDX-License-Identifier: Apache-2.0
// SEATS: one manager seat among machines that know nothing of each other. A splitter gives a machine a place (lines of its own), a vote over the places decides the seat's session.
#include "mc.h"
#include <map>
#include <set>
const int MAXP=4,MAXM=3;
struct V{u8 tag,gen,sess;};                                    // a copy of the seat's register
struct P{u8 pc,b,i,e,sess,ended; V v,w; u8 mine;};             // a machine's running session
struct S{u8 x[MAXP],y[MAXP],own[MAXP],bal[MAXP]; V r[MAXP]; u8 slg,sls,slrel; uint32_t dead; uint32_t deadgen; P p[MAXM]; u8 gens[MAXM]; u8 crashes,restarts,retries,releases,states,bad;};
std::set<std::string> d; static bool D(const char*s){return d.count(s);} int NP=3,NM=3;
static int mach(int sess){return (sess-1)/4;} static int sessOf(int m,int g){return 1+m*4+g;}
enum{L_OWN,L_Y,L_X,L_YY,L_SETY,L_XX,L_REC,L_FULL,L_BAL,L_CLAIM,L_COL,L_DEC,L_WAIT,L_PUB,L_CHK,L_ACC,L_BACK,L_SEAT,L_REL,L_CRASH,L_START,L_STATE};
const char*LN[]={"finds own place","reads Y","writes X","reads Y again","sets Y","reads X","records its place","no place left","reads a ballot","CLAIM","collect","may take the seat","must not take it","publishes itself","checks a ballot","ACCEPT","superseded","writes the seat's line","RELEASES","crash","new session","operator states death"};
static bool dead(const S&s,const V&v){ return D("death_is_number")? (s.deadgen>>v.gen&1) : (s.dead>>v.sess&1); }
static bool may(const S&s,int m,const V&v){ if(!v.gen||mach(v.sess)==m||D("suspicion_is_proof")) return true;
  if(s.slrel&&(s.sls==v.sess||D("release_not_compared"))) return true; return dead(s,v); }
template<class E> void gen(const S&s,E emit){
 for(int m=0;m<NM;m++){ const P&x=s.p[m]; S n=s; P&y=n.p[m]; auto L=[&](int l){return l*4+m;};
  if(!x.sess){ if(s.gens[m]==0||s.restarts){ if(s.gens[m]) n.restarts--; if(n.gens[m]<4){ y=P{}; y.sess=sessOf(m,n.gens[m]++); y.pc=1; emit(n,L(L_START)); } } continue; }
  int b=x.b;
  switch(x.pc){
  case 1: { for(int q=0;q<NP;q++) if(s.own[q]==m+1){ y.b=q; y.pc=8; break; } if(y.pc==1){ y.b=0; y.pc=2; } emit(n,L(L_OWN)); break; }
  case 2: if(b==NP){ break; } if(s.y[b]&&!D("places_used_again")) y.b++; else y.pc=3; emit(n,L(L_Y)); break;
  case 3: n.x[b]=x.sess; y.pc=D("no_door_check")?5:4; emit(n,L(L_X)); break;
  case 4: if(s.y[b]&&!D("places_used_again")){ y.b++; y.pc=2; } else y.pc=D("no_name_check")?7:5; emit(n,L(L_YY)); break;
  case 5: n.y[b]=1; y.pc=6; emit(n,L(L_SETY)); break;
  case 6: if(s.x[b]==x.sess) y.pc=7; else { y.b++; y.pc=2; } emit(n,L(L_XX)); break;
  case 7: n.own[b]=m+1; if(D("no_name_check")) n.y[b]=1; y.pc=8; emit(n,L(L_REC)); break;
  case 8: { int own=s.bal[x.i]; if(own>x.e) y.e=own; y.i++; if(y.i==NP){ y.i=0; int e=y.e+1; if(!D("ballots_not_unique")) while((e-1)%NP!=b) e++; y.e=e; y.pc=D("collect_before_claim")?10:9; } emit(n,L(L_BAL)); break; }
  case 9: n.bal[b]=x.e; y.pc=D("collect_before_claim")?11:10; emit(n,L(L_CLAIM)); break;
  case 10: { const V&c=s.r[x.i]; bool better=D("highest_generation")?c.gen>x.v.gen:c.tag>x.v.tag; if(!D("no_collect")||x.i==b) if(better) y.v=c; y.i++; if(y.i==NP){ y.i=0; y.pc=D("collect_before_claim")?9:11; } emit(n,L(L_COL)); break; }
  case 11: if(x.v.sess==x.sess){ y.w=x.v; y.w.tag=x.e; y.v=V{}; y.pc=12; emit(n,L(L_DEC)); }
     else if(may(s,m,x.v)&&x.v.gen<6){ y.w=V{x.e,(u8)(x.v.gen+1),x.sess}; y.v=V{}; y.pc=12; emit(n,L(L_DEC)); }
     else if(s.retries){ n.retries--; y.v=V{}; y.e=0; y.i=0; y.pc=8; emit(n,L(L_WAIT)); } break;
  case 12: n.r[D("shared_copy")?0:b]=x.w; y.pc=D("accept_without_check")?14:13; emit(n,L(L_PUB)); break;
  case 13: if(s.bal[x.i]>x.e&&!(D("check_own_ballot_only")&&x.i!=b)){ if(s.retries){ n.retries--; y.w=V{}; y.e=0; y.i=0; y.pc=8; emit(n,L(L_BACK)); } }
     else { y.i++; if(y.i==NP){ y.i=0; y.e=0; y.pc=14; y.mine=1; emit(n,L(L_ACC)); } else emit(n,L(L_CHK)); } break;
  case 14: n.slg=x.w.gen; n.sls=x.sess; n.slrel=0; y.mine=1; y.pc=15; emit(n,L(L_SEAT)); break;
  case 15: if(s.releases){ n.releases--; n.slrel=1; if(!D("release_is_not_last")) { y=P{}; } else y.pc=16; emit(n,L(L_REL)); } break;
  case 16: n.slg=x.w.gen; n.sls=x.sess; y=P{}; emit(n,L(L_SEAT)); break;
  }
  if(s.crashes){ S q=s; q.crashes--; q.p[m]=P{}; emit(q,L(L_CRASH)); }
  if(D("sessions_overlap")&&s.restarts&&m+1<NM&&!s.p[m+1].sess&&s.gens[m]<4){ S q=s; q.restarts--; q.p[m+1]=P{}; q.p[m+1].sess=sessOf(m,q.gens[m]++); q.p[m+1].pc=8; int f=-1; for(int k=0;k<NP;k++) if(s.own[k]==m+1) f=k; if(f>=0){ q.p[m+1].b=f; q.p[m+1].i=0; emit(q,L(L_START)); } }
 }
 // The operator states the death of a session that is in some copy and does not run any more (or, with the rule dropped, of its number).
 if(s.states) for(int q=0;q<NP;q++){ const V&v=s.r[q]; if(!v.gen) continue; bool alive=false; for(int m=0;m<NM;m++) if(s.p[m].sess==v.sess) alive=true; if(alive||s.dead>>v.sess&1) continue;
   S n=s; n.states--; n.dead|=1u<<v.sess; n.deadgen|=1u<<v.gen; emit(n,L_STATE*4); }
}
int main(int c,char**v){ size_t cap=30000000; S s; memset(&s,0,sizeof s); s.crashes=1;s.restarts=1;s.retries=1;s.releases=0;s.states=1; long every=0;
 for(int i=1;i<c;i++){ std::string a=v[i]; auto e=a.find('='); std::string k=a.substr(0,e),w=a.substr(e+1); int x=atoi(w.c_str()); if(k=="drop")d.insert(w); else if(k=="crashes")s.crashes=x; else if(k=="restarts")s.restarts=x; else if(k=="retries")s.retries=x; else if(k=="releases")s.releases=x; else if(k=="states")s.states=x; else if(k=="np")NP=x; else if(k=="nm")NM=x; else if(k=="cap")cap=x*1000000ul; else if(k=="every")every=x; else return 2; }
 Explorer<S> X;
 // The line owners: sessions that accepted and may write the seat's lines; machines that hold one place.
 auto bad=[&](const S&t){ int n=0; for(int m=0;m<NM;m++) n+=t.p[m].mine; if(n>1) return 1; if(!D("sessions_overlap")) for(int a=0;a<NM;a++) for(int b=a+1;b<NM;b++) if(t.p[a].pc>=7&&t.p[b].pc>=7&&t.p[a].b==t.p[b].b&&t.p[a].b<NP) return 2; return 0; };
 int b=X.run(s,[&](const S&t,auto e){gen(t,e);},bad,cap); std::vector<long> cnt(32); for(auto&l:X.lab) cnt[l/4]++;
 printf("seats %s states=%zu edges=%zu%s places=%ld accepts=%ld releases=%ld statements=%ld\n",b==1?"VIOLATION two sessions own one seat":b==2?"VIOLATION two machines hold one place":"ok",X.st.size(),X.edges,X.capped?" CAPPED":"",cnt[L_REC],cnt[L_ACC],cnt[L_REL],cnt[L_STATE]);
 if(b){ printf("   %zu steps: ",X.trace(X.badAt).size()); for(int l:X.trace(X.badAt)) printf("%s(%d); ",LN[l/4],l%4); puts(""); }
 // Progress: from every n-th state one machine alone, without faults, comes to an end: it owns the seat, or another session does, or places ran out.
 if(!b&&every){ long tried=0,owned=0,taken=0,full=0; for(size_t i=0;i<X.st.size();i+=every) for(int m=0;m<NM;m++){ S t=X.st[i]; t.crashes=t.releases=t.states=0; t.restarts=9; t.retries=9; tried++;
   int steps=0; for(;steps<400;steps++){ S nx; bool has=false; gen(t,[&](const S&u,int l){ if(!has&&l%4==m&&l/4!=L_STATE){ nx=u; has=true; } }); if(!has) break; t=nx; if(t.p[m].mine) break; }
   if(t.p[m].mine) owned++; else if(t.p[m].sess&&t.p[m].pc==2&&t.p[m].b==NP) full++; else taken++; }
   printf("   alone from %ld states: owns the seat %ld, seat is another's %ld, no place left %ld\n",tried,owned,taken,full); } }
